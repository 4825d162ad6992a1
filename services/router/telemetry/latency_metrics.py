"""Latencies of requests for Prometheus, with exemplars: from a bucket to a trace that fell into it."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from services.router.telemetry.outcome import Goal, goal
from services.router.telemetry.token_gaps import MODES, GapMetrics
from shared.contracts.inference import RequestFinished
from shared.telemetry import names
from shared.telemetry.prometheus import counter, histogram


class Timings:
    """By mode. ITL is in ``gaps``, where streams note it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placement = histogram(names.ROUTER_PLACEMENT, registry)
        self.resume = histogram(names.ROUTER_RESUME, registry)
        self.gaps = GapMetrics()
        registry.register(self.gaps)
        ttft, tpot, e2e = (
            histogram(metric, registry) for metric in (names.ROUTER_TTFT, names.ROUTER_TPOT, names.ROUTER_E2E)
        )
        # Looking a label child up costs more than observing: the few there are, are looked up once.
        self._by_mode = {mode: (ttft.labels(mode), tpot.labels(mode), e2e.labels(mode)) for mode in MODES}

    def add(self, told: RequestFinished, longest_gap_s: float) -> None:
        """One request that ended well. Those that are traced are examples."""
        example = {"trace_id": told.trace_id} if told.trace_id else None
        ttft, tpot, e2e = self._by_mode[told.mode]
        e2e.observe(told.e2e_s, example)
        if told.ttft_s >= 0:
            ttft.observe(told.ttft_s, example)
        if told.itl_s >= 0:
            tpot.observe(told.itl_s, example)
        self.gaps.ended(told.mode, longest_gap_s, told.trace_id)


class Goals:
    """What became of targets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        goals = counter(names.ROUTER_GOALS, registry)
        self._of = {became: goals.labels(became.value) for became in Goal}

    def add(self, told: RequestFinished) -> None:
        """One request ended."""
        if (became := goal(told)) is not None:
            self._of[became].inc()


class TraceMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """Traces by why they were kept, when somebody asks."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> list[CounterMetricFamily]:
        """prometheus_client asks for this on each scrape."""
        metric = names.ROUTER_TRACES
        family = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for why, count in self._counts.items():
            family.add_metric([why], count)
        return [family]
