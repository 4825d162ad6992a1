"""Sums what the engine's steps have computed and how long they took, for load reports."""

from __future__ import annotations

from shared.contracts.load import StepTotals


class StepTotalsCounter:
    """Each step is added as the totals of that step alone."""

    __slots__ = ("_context", "_decode_steps", "_pairs", "_prefill_steps", "_prompt_tokens", "_requests", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._prefill_steps = 0
        self._prompt_tokens = 0
        self._pairs = 0.0
        self._decode_steps = 0
        self._requests = 0
        self._context = 0

    def add(self, step: StepTotals) -> None:
        """A step has ended."""
        self._seconds += step.seconds
        self._prefill_steps += step.prefill_steps
        self._prompt_tokens += step.prefill_tokens
        self._pairs += step.prefill_pairs
        self._decode_steps += step.decode_steps
        self._requests += step.decode_requests
        self._context += step.decode_context_tokens

    def totals(self) -> StepTotals:
        """Since the start."""
        return StepTotals(
            seconds=self._seconds,
            prefill_steps=self._prefill_steps,
            prefill_tokens=self._prompt_tokens,
            prefill_pairs=self._pairs,
            decode_steps=self._decode_steps,
            decode_requests=self._requests,
            decode_context_tokens=self._context,
        )
