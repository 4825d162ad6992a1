"""Totals and recent speeds of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.engines.simulated.core.sequence import Sequence
from services.worker.telemetry.step_totals import StepTotalsCounter
from shared.contracts.load import StepTotals

SPEED_MEMORY = 0.9
"""Weight of the old value when a step adds a sample of a speed."""
PREFILL_SAMPLE_TOKENS_MIN = 32
"""Shorter prefills are not sampled: their time is mostly the fixed cost of a step."""


@dataclass(slots=True)
class Measures:
    """Totals since the engine's start, and two recent speeds."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    received_s: float = 0.0
    generated_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_s_per_token: float = 0.0
    steps: StepTotalsCounter = field(default_factory=StepTotalsCounter)

    def prompt_finished(self, sequence: Sequence) -> None:
        """Count the prompt of ``sequence``, which has its first token."""
        stats = sequence.stats
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.received_tokens += stats.received_tokens
        self.received_bytes += stats.received_bytes
        self.received_s += stats.received_s
        self.computed_tokens += sequence.prompt_tokens - stats.cached_tokens - stats.received_tokens

    def step_finished(self, step: StepTotals) -> None:
        """Add the totals of one step."""
        self.steps.add(step)
        if step.prefill_tokens >= PREFILL_SAMPLE_TOKENS_MIN and step.seconds:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, step.prefill_tokens / step.seconds)
        if step.decode_steps:
            self.decode_s_per_token = _blend(self.decode_s_per_token, step.seconds)


def _blend(old: float, sample: float) -> float:
    return SPEED_MEMORY * old + (1 - SPEED_MEMORY) * sample if old else sample
