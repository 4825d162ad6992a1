"""What each step of vLLM's engine computed and how long it took, from its scheduler's details of the iteration.

Instants are on the front end's clock. Needs no vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from services.worker.core.step_tally import StepTally
from shared.contracts.load import StepTotals

BETWEEN_SHARE, BETWEEN_S = 0.25, 0.005
"""Of an engine that goes on without a pause, scheduling and the way of its results add no more than this to a step."""


class StepMeter:
    """Told of each step when its results are here."""

    def __init__(self) -> None:
        self.tokens_per_use = 0
        """Tokens that a full KV cache holds."""
        self._tally = StepTally()
        self._pairs = 0.0
        self._last_at = 0.0
        self._is_told = False

    def prompt_computed(self, computed: int, cached: int) -> None:
        """One whose last chunk was in the step that comes next. Its earlier chunks' pairs count with that."""
        self._pairs += computed * (cached + computed / 2)

    def step(self, stats: Any, at: float) -> None:
        """The scheduler's statistics after a step; without details of it, nothing is known."""
        details = stats.iteration_details
        if details is None or details.is_dummy:
            return
        elapsed_s = details.elapsed_ms / 1000
        since_s, self._last_at = at - self._last_at, at
        goes_on = elapsed_s <= since_s <= elapsed_s * (1 + BETWEEN_SHARE) + BETWEEN_S
        decoding = details.num_generation_requests
        pairs, self._pairs = self._pairs, 0.0
        self._is_told = True
        self._tally.add(
            StepTotals(
                seconds=since_s if goes_on else elapsed_s,
                prefill_steps=int(details.num_ctx_tokens > 0),
                prefill_tokens=details.num_ctx_tokens,
                prefill_pairs=pairs,
                decode_steps=int(decoding > 0),
                decode_requests=decoding,
                decode_context_tokens=round(stats.kv_cache_usage * self.tokens_per_use) if decoding else 0,
            )
        )

    def totals(self) -> StepTotals | None:
        """Since the start; None while nothing is known."""
        return self._tally.totals() if self._is_told else None


class NoIterations(logging.Filter):
    """vLLM logs the details of every step for whoever reads its INFO: hundreds of lines a second."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Anything else passes."""
        return "Iteration(" not in str(record.msg)
