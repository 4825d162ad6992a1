"""Measurements of a simulated engine, like the worker's ``Measures``."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from shared.contracts.load import StepTotals

if TYPE_CHECKING:
    from replay.engine import Step

MEMORY = 0.9
"""Weight of the old value in a moving average."""
PREFILL_SAMPLE_TOKENS_MIN = 32
ITL_GROWTH = 1.01
"""Each bucket of times between tokens is wider than the one before by this factor."""


class Speeds:
    """Two moving averages, totals of all steps, and a histogram of the times between tokens."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_s_per_token = 0.0
        self.busy_s = 0.0
        self.prefill_steps = 0
        self.prefill_tokens = 0
        self.prefill_pairs = 0.0
        self.decode_steps = 0
        self.decode_requests = 0
        self.decode_context_tokens = 0
        self.itl: Counter[int] = Counter()
        """Tokens by bucket of the time since the token before."""

    def stepped(self, step: Step) -> None:
        """Steps have ended."""
        count, decoding = step.count, step.decoding
        took_s = step.seconds(count)
        self.busy_s += took_s
        if step.prefill_tokens:
            self.prefill_steps += 1
            self.prefill_tokens += step.prefill_tokens
            self.prefill_pairs += step.prefill_pairs
            if step.prefill_tokens >= PREFILL_SAMPLE_TOKENS_MIN and took_s:
                self.prefill_tokens_per_s = blend(self.prefill_tokens_per_s, step.prefill_tokens / took_s, 1)
        if decoding:
            self.decode_steps += count
            self.decode_requests += count * decoding
            self.decode_context_tokens += count * step.context_tokens + decoding * count * (count - 1) // 2
            each_s = took_s / count
            self.decode_s_per_token = blend(self.decode_s_per_token, each_s, count)
            self.itl[bucket_of(each_s)] += decoding * count

    def totals(self) -> StepTotals:
        """For the load report."""
        return StepTotals(
            seconds=self.busy_s,
            prefill_steps=self.prefill_steps,
            prefill_tokens=self.prefill_tokens,
            prefill_pairs=self.prefill_pairs,
            decode_steps=self.decode_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )


def blend(old: float, sample: float, times: int) -> float:
    """The moving average after the same sample came so many times."""
    weight = MEMORY**times
    return weight * old + (1 - weight) * sample if old else sample


def bucket_of(seconds: float) -> int:
    """Of a time between tokens."""
    return math.floor(math.log(max(seconds, 1e-9)) / math.log(ITL_GROWTH))


def seconds_of(bucket: int) -> float:
    """The middle of a bucket."""
    return math.pow(ITL_GROWTH, bucket + 0.5)
