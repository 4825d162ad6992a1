"""The current step of an engine, or a run of steps that only decode."""

from __future__ import annotations

import math

from replay.decoders import Decoders
from replay.job import Job
from replay.profile import Profile


class Step:
    """Its duration and its work."""

    def __init__(self) -> None:
        self.began_at = 0.0
        self.ends_at = math.inf
        self.count = 0
        self.chunks: list[tuple[Job, int]] = []
        self.first_s = 0.0
        """Duration of the first step of the run."""
        self.growth_s = 0.0
        """Added duration of each further step."""
        self.prefill_tokens = 0
        self.prefill_pairs = 0.0
        """Sum over these tokens of the tokens before them."""
        self.decoding = 0
        self.context_tokens = 0
        """Context tokens of the decoding sequences in the first step."""

    def begin(self, now: float, chunks: list[tuple[Job, int]], decoders: Decoders, profile: Profile) -> None:
        """Start a step, or a run of steps until the next event."""
        self.began_at, self.chunks = now, chunks
        self.prefill_tokens, self.prefill_pairs = 0, 0.0
        self.decoding, self.context_tokens = len(decoders), decoders.context_tokens
        for job, count in chunks:
            if count == 1 and job.computed > job.prompt_tokens:
                self.decoding += 1
                self.context_tokens += job.tokens
            else:
                self.prefill_tokens += count
                self.prefill_pairs += count * (job.computed - count / 2)
        self.first_s = profile.step_s(self.prefill_tokens, self.prefill_pairs, self.decoding, self.context_tokens)
        self.growth_s = self.decoding * profile.decode_per_context_token_s
        self.count = 1 if chunks else decoders.steps_alike
        self.ends_at = now + self.seconds(self.count)

    def seconds(self, steps: int) -> float:
        """Duration of the first ``steps`` steps of the run."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def cut(self, now: float) -> None:
        """Shorten the run to end with the step in progress at ``now``."""
        target = now - self.began_at
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= target:
                high = middle
            else:
                low = middle + 1
        self.count = low
        self.ends_at = self.began_at + self.seconds(low)
