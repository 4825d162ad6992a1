"""What each step of vLLM's engine computed and how long it took, from its scheduler's details of the iteration.

The details' own ``elapsed_ms`` is the time that the engine's loop waited for the model: next to nothing where the model
runs in the same process. A step takes from the end of the one before, or from when its first request was scheduled.
Instants are on the machine's monotonic clock, which front end and engine share. Needs no vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from services.worker.telemetry.step_totals import StepTotalsCounter
from shared.contracts.load import StepTotals

SCHEDULED = "SCHEDULED"
"""The name of vLLM's event."""


class StepMeter:
    """Told of each step when its results are here."""

    def __init__(self) -> None:
        self.tokens_per_use = 0
        """Tokens that a full KV cache holds."""
        self._tally = StepTotalsCounter()
        self._pairs = 0.0
        self._scheduled_at = 0.0
        """When the first of the requests was scheduled that have their first token in this step."""
        self._made_at = 0.0
        self._last_at = 0.0
        self._goes_on = False
        """The next step begins where the last one ended."""
        self._is_told = False

    def results(self, outputs: list[Any], made_at: float) -> None:
        """Some came out of the step that is told of next."""
        self._made_at = made_at
        for output in outputs:
            if output.prefill_stats is None:
                continue
            stats = output.prefill_stats
            cached = stats.num_local_cached_tokens + stats.num_external_cached_tokens
            # Its earlier chunks were in earlier steps: their pairs are told late.
            self._pairs += stats.num_computed_tokens * (cached + stats.num_computed_tokens / 2)
            for event in output.events or ():
                if event.type.name == SCHEDULED and (not self._scheduled_at or event.timestamp < self._scheduled_at):
                    self._scheduled_at = event.timestamp

    def step(self, stats: Any, now: float) -> None:
        """The scheduler's statistics after a step; without details of it, nothing is known."""
        details = stats.iteration_details
        if details is None or details.is_dummy:
            return
        ended_at = self._made_at or now
        began_at = self._last_at if self._goes_on else self._scheduled_at
        pairs, self._pairs = self._pairs, 0.0
        self._made_at = self._scheduled_at = 0.0
        self._last_at, self._goes_on = ended_at, stats.num_running_reqs > 0
        if not 0.0 < began_at < ended_at:
            return
        decoding = details.num_generation_requests
        self._is_told = True
        self._tally.add(
            StepTotals(
                seconds=ended_at - began_at,
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
