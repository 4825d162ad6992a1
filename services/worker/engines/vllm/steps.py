"""Work and duration of each step of vLLM's engine, from the iteration details in vLLM's scheduler statistics.

The details' ``elapsed_ms`` cannot be used: it is the time that the engine's loop waited for the model, which is almost
nothing where the model runs in the same process. Here a step begins at the end of the previous step, or after a pause
at the time when its first request was scheduled. Times are on the machine's monotonic clock, which vLLM's front end and
engine share.

An engine with pipeline stages has as many batches in flight, of different requests, and each result comes a stage after
the one before. A request gets its next token when all of them have come. Such results make one step together: until
each running request was in one, and one had a token. That of a prompt is then as long as its way through all stages,
with the time in which they fill. This module does not import vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from shared.bounded import Bounded
from shared.contracts.load import StepTotals
from shared.engine_speed.steps import StepTotalsCounter

SCHEDULED = "SCHEDULED"
"""Name of vLLM's event for a scheduled request."""
BEGUN_MAX = 4096
"""Prompts kept at a time; an aborted one stays until others take its place."""


class StepMeter:
    """Call ``results`` and then ``step`` for each step whose results have arrived."""

    def __init__(self, stages: int = 1) -> None:
        self.tokens_per_use = 0
        """Tokens that fill the KV cache; vLLM's ``kv_cache_usage`` is a share of them."""
        self.counter = StepTotalsCounter()
        self._pairs = 0.0
        self._scheduled_at = 0.0
        """The earliest scheduling time of the requests that have their first token in this step."""
        self._begun = Bounded[str, Any](BEGUN_MAX)
        """Statistics of prompts, by request, whose answer began before they took part in a step."""
        self._results_at = 0.0
        self._last_at = 0.0
        self._is_continued = False
        """The next step begins where the last one ended."""
        self._has_steps = False
        self._is_pipeline = stages > 1
        self._requests = self._prompt_batches = self._prompt_tokens = self._decoding = 0
        """Sums over the batches of a step that is not over."""
        self._has_tokens = False

    def begun(self, output: Any) -> None:
        """A request's first output, which no step made."""
        self._begun[output.request_id] = output.prefill_stats

    def results(self, outputs: list[Any], results_at: float) -> None:
        """Add outputs of the step whose statistics come next."""
        self._results_at = results_at
        self._has_tokens |= bool(outputs)
        for output in outputs:
            stats = output.prefill_stats
            if stats is None and self._begun:
                stats = self._begun.pop(output.request_id, None)
            if stats is None:
                continue
            cached = stats.num_local_cached_tokens + stats.num_external_cached_tokens
            # With chunked prefill, the pairs of earlier chunks are counted late, in the step of the last chunk.
            self._pairs += stats.num_computed_tokens * (cached + stats.num_computed_tokens / 2)
            for event in output.events or ():
                if event.type.name == SCHEDULED and (not self._scheduled_at or event.timestamp < self._scheduled_at):
                    self._scheduled_at = event.timestamp

    def step(self, stats: Any, now: float) -> None:
        """Add the scheduler's statistics after a step. A step without iteration details is not counted."""
        details = stats.iteration_details
        if details is None or details.is_dummy:
            return
        ended_at, decoding = self._results_at or now, details.num_generation_requests
        self._results_at = 0.0
        self._requests += details.num_ctx_requests + decoding
        self._prompt_batches += int(details.num_ctx_tokens > 0)
        self._prompt_tokens += details.num_ctx_tokens
        self._decoding += decoding
        running = stats.num_running_reqs
        if self._is_pipeline and running and not (self._has_tokens and self._requests >= running):
            return
        began_at = self._last_at if self._is_continued else self._scheduled_at
        if 0.0 < began_at < ended_at:
            is_decoding = self._decoding > 0
            self._has_steps = True
            self.counter.add(
                StepTotals(
                    seconds=ended_at - began_at,
                    prefill_steps=self._prompt_batches,
                    prefill_tokens=self._prompt_tokens,
                    prefill_pairs=self._pairs,
                    decode_steps=int(is_decoding),
                    decode_requests=self._decoding,
                    decode_context_tokens=round(stats.kv_cache_usage * self.tokens_per_use) if is_decoding else 0,
                )
            )
        self._last_at, self._is_continued = ended_at, running > 0
        self._pairs = self._scheduled_at = 0.0
        self._requests = self._prompt_batches = self._prompt_tokens = self._decoding = 0
        self._has_tokens = False

    def totals(self) -> StepTotals | None:
        """Totals since the start; None before the first step with details."""
        return self.counter.totals() if self._has_steps else None


class NoIterations(logging.Filter):
    """Drops the INFO line that vLLM logs for every step, hundreds per second."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Iteration(" not in str(record.msg)
