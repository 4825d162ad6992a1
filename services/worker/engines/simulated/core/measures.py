"""Totals and recent speeds of a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.engines.simulated.core.sequence import Sequence
from services.worker.telemetry.step_totals import StepTotalsCounter
from shared.contracts.load import StepTotals

SPEED_MEMORY = 0.9
"""How much of a speed's old value stays when a step brings a new sample."""
PREFILL_SAMPLE_TOKENS_MIN = 32
"""The time of shorter prefills is mostly the fixed cost of a step."""


@dataclass(slots=True)
class Measures:
    """Totals since the engine's start, and two speeds."""

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
        """The first token of ``sequence`` is out."""
        account = sequence.account
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += account.cached_tokens
        self.received_tokens += account.received_tokens
        self.received_bytes += account.received_bytes
        self.received_s += account.received_s
        self.computed_tokens += sequence.prompt_tokens - account.cached_tokens - account.received_tokens

    def step_finished(self, step: StepTotals) -> None:
        """The totals of this one step."""
        self.steps.add(step)
        if step.prefill_tokens >= PREFILL_SAMPLE_TOKENS_MIN and step.seconds:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, step.prefill_tokens / step.seconds)
        if step.decode_steps:
            self.decode_s_per_token = _blend(self.decode_s_per_token, step.seconds)


def _blend(old: float, sample: float) -> float:
    return SPEED_MEMORY * old + (1 - SPEED_MEMORY) * sample if old else sample
