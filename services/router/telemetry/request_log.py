"""The books: Prometheus metrics, a log line for each request, and the batch of finished requests for the collector."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.router.placement.request_fields import Mode
from services.router.relay.request_context import RequestContext, finished
from services.router.state.fleet import Fleet
from services.router.state.kv_feed import KvFeed
from services.router.state.prefix_index import IndexState
from services.router.telemetry.latency_metrics import Goals, Timings, TraceMetrics
from services.router.telemetry.prediction_metrics import PredictionTimings
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.parity import Parity, ParityBook
from shared.bus.leg_inbox import Orphans
from shared.bus.port import Bus, BusDown
from shared.contracts.channels import REQUESTS_FINISHED
from shared.contracts.failures import Reason
from shared.contracts.ids import RouterId
from shared.contracts.inference import RequestFinished, RequestsFinished
from shared.telemetry import names
from shared.telemetry.metrics import Metric
from shared.telemetry.prometheus import counter

log = logging.getLogger("baton.request")

MODES = tuple(mode.value for mode in Mode if mode is not Mode.AUTO)

REPORT_S = 0.1
"""How often finished requests are reported to the metrics collector."""
UNREPORTED_MAX = 10_000
"""Finished requests kept while NATS is away; the oldest are forgotten beyond that."""


class Counts:
    """Requests, by how they ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refusals = counter(names.ROUTER_REFUSALS, registry)
        self.retries = counter(names.ROUTER_RETRIES, registry)
        self.resumes = counter(names.ROUTER_RESUMES, registry)
        self._requests = counter(names.ROUTER_REQUESTS, registry)
        self._placements = counter(names.ROUTER_PLACEMENTS, registry)
        self._children: dict[tuple[str, int | str], Any] = {}

    def add(self, mode: str, status: int) -> None:
        """One request ended."""
        child = self._children.get((mode, status))
        if child is None:
            child = self._children[mode, status] = self._requests.labels(mode, str(status))
        child.inc()

    def placed(self, mode: str, why: str) -> None:
        """One request had been placed, for a reason out of the few that there are."""
        child = self._children.get((mode, why))
        if child is None:
            child = self._children[mode, why] = self._placements.labels(mode, why)
        child.inc()


class Ledger:
    """What the router remembers of its requests, for operators and for the collector."""

    def __init__(self, router_id: RouterId, tracing: Tracing, *, log_requests: bool) -> None:
        self._router_id = router_id
        self._tracing = tracing
        self._log_requests = log_requests and log.isEnabledFor(logging.INFO)
        self._unreported: list[RequestFinished] = []
        self.registry = CollectorRegistry()
        self.counts = Counts(self.registry)
        self.timings = Timings(self.registry)
        self.goals = Goals(self.registry)
        self.registry.register(TraceMetrics(tracing.counts))
        self.predictions = PredictionTimings(self.registry)
        self.tokens = Tokens(self.registry)

    def refused(self, status: int, reason: str, **known: str) -> None:
        """A request that was not even looked at; ``known``: what its head says, if that was read."""
        self.counts.add(Mode.AGGREGATED.value, status)
        self.counts.refusals.labels(reason).inc()
        if self._log_requests and known:
            facts = {name: value for name, value in known.items() if value}
            log.info("request", extra={"facts": {**facts, "status": status, "reason": reason}})

    def retried(self, reason: Reason, *, resumed: bool) -> None:
        """A request is placed again; ``resumed``: its client has had some of the answer."""
        (self.counts.resumes if resumed else self.counts.retries).labels(str(reason)).inc()

    def resumed(self, broken_s: float) -> None:
        """A stream goes on, so long after it broke off."""
        self.timings.resume.observe(broken_s)

    def finished(self, flight: RequestContext, now: float) -> RequestFinished:
        """A request is over; answers its story."""
        told = self._tracing.ended(flight, finished(flight, now))
        self.counts.add(told.mode, told.status)
        self.goals.add(told)
        if (placed := flight.story.placed) is not None:
            self.counts.placed(told.mode, placed.why)
        if told.reason:
            self.counts.refusals.labels(told.reason).inc()
        else:
            self.timings.add(told, flight.story.spent.gap_s_max)
            self.predictions.add(told, placed)
            self.tokens.add(told)
        if told.placement_s >= 0:
            self.timings.placement.observe(told.placement_s)
        if len(self._unreported) < UNREPORTED_MAX:
            self._unreported.append(told)
        if self._log_requests:
            log.info("request", extra={"facts": line(told)})
        return told

    async def report(self, bus: Bus) -> None:
        """Tell the collector, for ever."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report_now(bus)

    async def report_now(self, bus: Bus) -> None:
        """Tell the collector what is not told yet."""
        if not self._unreported:
            return
        requests, self._unreported = self._unreported, []
        try:
            await bus.publish(REQUESTS_FINISHED, RequestsFinished(router_id=self._router_id, requests=requests))
        except BusDown as error:
            self._unreported = requests + self._unreported
            log.debug("not reported: %s", error)


class Tokens:
    """Token counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompt = counter(names.ROUTER_PROMPT_TOKENS, registry)
        self.completion = counter(names.ROUTER_COMPLETION_TOKENS, registry)
        self.predicted = counter(names.ROUTER_CACHED_PREDICTED, registry)
        self.actual = counter(names.ROUTER_CACHED_ACTUAL, registry)

    def add(self, told: RequestFinished) -> None:
        """One request that ended well."""
        if told.prompt_tokens > 0:
            self.prompt.inc(told.prompt_tokens)
        if told.completion_tokens > 0:
            self.completion.inc(told.completion_tokens)
        if told.predicted_cached_tokens >= 0 and told.cached_tokens >= 0:
            self.predicted.inc(told.predicted_cached_tokens)
            self.actual.inc(told.cached_tokens)


def line(told: RequestFinished) -> dict[str, object]:
    """What the log says of a request: no text of it, and nothing that is not known."""
    values = {name: getattr(told, name) for name in told.__struct_fields__ if name != "ttft_parts"}
    if told.ttft_parts is not None:
        values |= {f"ttft_{name}": value for name, value in msgspec.structs.asdict(told.ttft_parts).items() if value}
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
        if value not in (-1, -1.0, "")
    }


class LiveMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """What is read when somebody asks: requests in flight, the index, the bus."""

    def __init__(
        self, flights: set[RequestContext], fleet: Fleet, kv: KvFeed, parity: ParityBook, bus: Bus, orphans: Orphans
    ) -> None:
        self._flights = flights
        self._orphans = orphans
        self._parity = parity
        self._fleet = fleet
        self._kv = kv
        self._bus = bus

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """prometheus_client asks for this on each scrape."""
        states = gauge_family(names.ROUTER_INDEX_STATE)
        blocks = gauge_family(names.ROUTER_INDEX_BLOCKS)
        for worker_id, entry in self._fleet.index.entries.items():
            blocks.add_metric([worker_id], self._fleet.index.count(worker_id))
            for state in IndexState:
                states.add_metric([worker_id, state.value], float(entry.state is state))
        parities = gauge_family(names.ROUTER_TOKEN_PARITY)
        for worker_id in self._fleet.cluster.workers.keys() & self._parity.standings.keys():
            for parity in Parity:
                parities.add_metric([worker_id, parity.value], float(self._parity.parity(worker_id) is parity))
        in_flight = gauge_family(names.ROUTER_IN_FLIGHT)
        in_flight.add_metric([], len(self._flights))
        orphans = CounterMetricFamily(names.ROUTER_ORPHANS.name, names.ROUTER_ORPHANS.meaning, labels=("kind",))
        orphans.add_metric(["served"], self._orphans.served)
        orphans.add_metric(["awaited"], self._orphans.awaited)
        counts = self._bus.counts
        return [
            in_flight,
            orphans,
            states,
            blocks,
            parities,
            counter_family(names.ROUTER_SNAPSHOTS, self._kv.snapshots),
            counter_family(names.BUS_DROPPED, counts.dropped),
            counter_family(names.BUS_BAD, counts.bad_messages),
            counter_family(names.BUS_PARTS_LOST, counts.parts_lost),
            counter_family(names.BUS_RECONNECTS, counts.reconnects),
        ]


def gauge_family(metric: Metric) -> GaugeMetricFamily:
    """An empty family, to be filled."""
    return GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)


def counter_family(metric: Metric, value: float) -> CounterMetricFamily:
    """A family of one value."""
    return CounterMetricFamily(metric.name, metric.meaning, value=value)
