"""What the router counts of requests while it serves them. No base classes of others are here, so that it can be
compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry

from services.router.placement.placement import Placement
from services.router.request.facts import Mode
from services.router.request.timings import total_s
from services.router.telemetry.metrics import CountMetrics, GapMetrics
from services.router.telemetry.outcome import TargetOutcome, target_outcome
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished
from shared.telemetry import names
from shared.telemetry.prometheus import Buckets, counter, histogram

MODES: Final = tuple(mode.value for mode in Mode if mode is not Mode.AUTO)
UNCOUNTED_GAPS_MAX: Final = 4096
"""Gaps between tokens that may wait to be counted; beyond that, the next request that ends counts them."""
ITL_BOUNDS: Final = np.array(names.ROUTER_ITL.buckets)
OK: Final = "ok"


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry, traces_kept: Mapping[str, int]) -> None:
        self._requests = counter(names.ROUTER_REQUESTS, registry)
        self._placements = counter(names.ROUTER_PLACEMENTS, registry)
        self._refusals = counter(names.ROUTER_REFUSALS, registry)
        self._retries = counter(names.ROUTER_RETRIES, registry)
        self._resumes = counter(names.ROUTER_RESUMES, registry)
        self.quarantined = counter(names.ROUTER_QUARANTINED, registry).labels()
        self.unreported = counter(names.ROUTER_UNREPORTED, registry).labels()
        targets = counter(names.ROUTER_GOALS, registry)
        self._targets = {outcome: targets.labels(outcome.value) for outcome in TargetOutcome}
        self._placement_s = histogram(names.ROUTER_PLACEMENT, registry).labels()
        self._resume_s = histogram(names.ROUTER_RESUME, registry).labels()
        ttft, tpot, e2e, predicted = (
            histogram(metric, registry)
            for metric in (names.ROUTER_TTFT, names.ROUTER_TPOT, names.ROUTER_E2E, names.ROUTER_TTFT_PREDICTED)
        )
        self._latencies = {mode: (ttft.labels(mode), tpot.labels(mode), e2e.labels(mode)) for mode in MODES}
        self._predicted = {mode: predicted.labels(mode) for mode in MODES}
        self._prompt_tokens = counter(names.ROUTER_PROMPT_TOKENS, registry).labels()
        self._completion_tokens = counter(names.ROUTER_COMPLETION_TOKENS, registry).labels()
        self._predicted_cached_tokens = counter(names.ROUTER_CACHED_PREDICTED, registry).labels()
        self._cached_tokens = counter(names.ROUTER_CACHED_ACTUAL, registry).labels()
        self.gaps = StreamGaps()
        registry.register(GapMetrics(self.gaps.of))
        registry.register(CountMetrics(names.ROUTER_TRACES, traces_kept))

    def refused(self, status: int, reason: str) -> None:
        """A request was refused before it was read."""
        self._requests.labels(Mode.AGGREGATED.value, status).value += 1
        self._refusals.labels(reason).value += 1

    def retried(self, reason: Reason, *, resumed: bool) -> None:
        """A request is retried; ``resumed``: after part of the response was sent."""
        (self._resumes if resumed else self._retries).labels(reason).value += 1

    def resumed(self, broken_s: float) -> None:
        """A stream continues after an interruption of ``broken_s``."""
        self._resume_s.observe(broken_s)

    def prefetched(self, finished: RequestFinished) -> None:
        """A prefetch has ended, which counts in no latency and no target: it answers nothing."""
        self._requests.labels(finished.mode, finished.status).value += 1
        if finished.reason:
            self._refusals.labels(finished.reason).value += 1

    def finished(self, finished: RequestFinished, placement: Placement | None, gap_s_max: float) -> None:
        """A request has ended."""
        self._requests.labels(finished.mode, finished.status).value += 1
        if (outcome := target_outcome(finished)) is not None:
            self._targets[outcome].value += 1
        if placement is not None:
            self._placements.labels(finished.mode, placement.why).value += 1
        if finished.reason:
            self._refusals.labels(finished.reason).value += 1
        else:
            self._observe_prediction(finished, placement)
            self._count_tokens(finished)
            if not finished.is_batch:
                self._observe_latencies(finished)
                self.gaps.ended(finished.mode, gap_s_max, finished.trace_id)
        if finished.placement_s >= 0:
            self._placement_s.observe(finished.placement_s)

    def _observe_latencies(self, finished: RequestFinished) -> None:
        trace_id = finished.trace_id
        ttft, tpot, e2e = self._latencies[finished.mode]
        e2e.observe(finished.e2e_s, trace_id)
        if finished.ttft_s >= 0:
            ttft.observe(finished.ttft_s, trace_id)
        if finished.itl_s >= 0:
            tpot.observe(finished.itl_s, trace_id)

    def _observe_prediction(self, finished: RequestFinished, placement: Placement | None) -> None:
        """Observe predicted over measured time since the last placement: the prediction covers nothing before that."""
        parts = finished.ttft_parts
        if placement is None or parts is None:
            return
        since_s = finished.ttft_s - parts.admission_s - parts.tokenize_s - parts.place_s - parts.failed_s
        if since_s > 0.0:
            self._predicted[finished.mode].observe(total_s(placement.predicted) / since_s)

    def _count_tokens(self, finished: RequestFinished) -> None:
        self._prompt_tokens.value += max(0, finished.prompt_tokens)
        self._completion_tokens.value += max(0, finished.completion_tokens)
        if finished.predicted_cached_tokens >= 0 and finished.cached_tokens >= 0:
            self._predicted_cached_tokens.value += finished.predicted_cached_tokens
            self._cached_tokens.value += finished.cached_tokens


class Gaps:
    """Times between the pieces of streams of one mode.

    Each relayed token has one: too many to count one by one. Streams append to ``noted``, and numpy counts what is
    there when a request ends or Prometheus scrapes.
    """

    def __init__(self) -> None:
        self.noted: list[float] = []
        """Gaps in seconds, not counted yet."""
        self.buckets = Buckets(names.ROUTER_ITL.buckets)

    def count(self) -> None:
        """Count ``noted``."""
        if not self.noted:
            return
        counts = self.buckets.counts
        found = np.bincount(np.searchsorted(ITL_BOUNDS, self.noted), minlength=len(counts))
        counts[:] = (found + counts).tolist()
        self.buckets.sum += sum(self.noted)
        self.noted.clear()


class StreamGaps:
    """The gaps of all streams, by mode."""

    def __init__(self) -> None:
        self.of = {mode: Gaps() for mode in MODES}

    def ended(self, mode: str, gap_s_max: float, trace_id: str) -> None:
        """A request has ended. ``trace_id`` is empty when its trace is not kept."""
        gaps = self.of[mode]
        if len(gaps.noted) > UNCOUNTED_GAPS_MAX:
            gaps.count()
        if trace_id and gap_s_max > 0.0:
            gaps.buckets.exemplify(gap_s_max, trace_id)
