"""What engines' steps have computed, as numbers that can be subtracted, added and divided (see ``StepTotals``)."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from shared.contracts.load import StepTotals


@dataclass(frozen=True, slots=True)
class Steps:
    """Totals, differences of totals, or rates."""

    seconds: float = 0.0
    prefill_steps: float = 0.0
    prompt_tokens: float = 0.0
    pairs: float = 0.0
    decode_steps: float = 0.0
    decode_requests: float = 0.0
    context_tokens: float = 0.0

    @classmethod
    def told(cls, totals: StepTotals) -> Steps:
        """As an engine tells them."""
        return cls(
            totals.seconds,
            float(totals.prefill_steps),
            float(totals.prefill_tokens),
            totals.prefill_pairs,
            float(totals.decode_steps),
            float(totals.decode_requests),
            float(totals.decode_context_tokens),
        )

    def values(self) -> tuple[float, ...]:
        """In the order of the fields."""
        return (
            self.seconds,
            self.prefill_steps,
            self.prompt_tokens,
            self.pairs,
            self.decode_steps,
            self.decode_requests,
            self.context_tokens,
        )

    def __add__(self, other: Steps) -> Steps:
        return Steps(*map(operator.add, self.values(), other.values()))

    def __sub__(self, other: Steps) -> Steps:
        return Steps(*map(operator.sub, self.values(), other.values()))

    def per(self, seconds: float) -> Steps:
        """The rate, when all of it took that long."""
        return Steps(*(one / seconds for one in self.values()))


NO_STEPS = Steps()
