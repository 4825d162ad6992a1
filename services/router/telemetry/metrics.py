"""The router's Prometheus metrics: of requests, of the admission queue, and of the router's view of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from services.router.placement import compiled
from services.router.placement.placement import Placement
from services.router.placement.placer import Fleet
from services.router.placement.request_fields import Mode
from services.router.relay.request_context import RequestContext
from services.router.state import block_table
from services.router.state.feeds import KvFeed
from services.router.state.prefix_index import IndexState, PrefixIndex
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.telemetry.outcome import TargetOutcome, target_outcome
from services.router.tokenize.parity import Parity, ParityBook
from shared.bus.leg_inbox import Orphans
from shared.bus.port import Bus
from shared.contracts.control import ROUTER_TROUBLES_MAX, RouterHealth
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished
from shared.telemetry import names
from shared.telemetry.metrics import Metric
from shared.telemetry.prometheus import Buckets, counter, gauge, histogram

MODES = tuple(mode.value for mode in Mode if mode is not Mode.AUTO)
UNCOUNTED_GAPS_MAX = 4096
"""Gaps between tokens that may wait to be counted; beyond that, the next request that ends counts them."""
ITL_BOUNDS = np.array(names.ROUTER_ITL.buckets)
TENANTS_NAMED_MAX = 32
"""The first this many tenants have series of their own; all others share one."""
NO_TENANT, OTHER_TENANTS = "(none)", "(others)"
"""No tenant can have these names: parentheses are not allowed in them."""
OK = "ok"


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
        self.gaps = GapMetrics()
        registry.register(self.gaps)
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
            self._predicted[finished.mode].observe(placement.predicted.total_s() / since_s)

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
        self.buckets = Buckets(names.ROUTER_ITL.buckets, has_created=False)

    def count(self) -> None:
        """Count ``noted``."""
        if not self.noted:
            return
        counts = self.buckets.counts
        found = np.bincount(np.searchsorted(ITL_BOUNDS, self.noted), minlength=len(counts))
        counts[:] = (found + counts).tolist()
        self.buckets.sum += sum(self.noted)
        self.noted.clear()


class GapMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    def __init__(self) -> None:
        self.of = {mode: Gaps() for mode in MODES}

    def collect(self) -> list[HistogramMetricFamily]:
        """prometheus_client calls this on each scrape."""
        family = HistogramMetricFamily(names.ROUTER_ITL.name, names.ROUTER_ITL.meaning, labels=names.ROUTER_ITL.labels)
        for mode, gaps in self.of.items():
            gaps.count()
            gaps.buckets.add_to(family, {"mode": mode})
        return [family]

    def ended(self, mode: str, gap_s_max: float, trace_id: str) -> None:
        """A request has ended. ``trace_id`` is empty when its trace is not kept."""
        gaps = self.of[mode]
        if len(gaps.noted) > UNCOUNTED_GAPS_MAX:
            gaps.count()
        if trace_id and gap_s_max > 0.0:
            gaps.buckets.exemplify(gap_s_max, trace_id)


class QueueMetrics:
    """The admission queue, and what each tenant has used."""

    def __init__(self, registry: CollectorRegistry, queue_max: int) -> None:
        gauge(names.ROUTER_QUEUE_MAX, registry).set(queue_max)
        self.queue = gauge(names.ROUTER_QUEUE, registry)
        self._waits = histogram(names.ROUTER_ADMISSION, registry).labels()
        self._requests = counter(names.ROUTER_TENANT_REQUESTS, registry)
        self._tokens = counter(names.ROUTER_TENANT_TOKENS, registry)
        self._named: set[str] = set()

    def waited(self, wait_s: float) -> None:
        self._waits.observe(wait_s)

    def ended(self, tenant: str, reason: str, computed_tokens: int, tokens_out: int) -> None:
        """A tenant's request has ended; ``reason`` is empty when it ended well."""
        label = self._label(tenant)
        self._requests.labels(label, reason or OK).value += 1
        self._tokens.labels(label, "computed").value += computed_tokens
        self._tokens.labels(label, "completion").value += tokens_out

    def _label(self, tenant: str) -> str:
        if tenant in self._named:
            return tenant
        if not tenant:
            return NO_TENANT
        if len(self._named) >= TENANTS_NAMED_MAX:
            return OTHER_TENANTS
        self._named.add(tenant)
        return tenant


class CountMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """Counts that are kept elsewhere, by the metric's one label."""

    def __init__(self, metric: Metric, counts: Mapping[str, int]) -> None:
        self._metric = metric
        self._counts = counts

    def collect(self) -> list[CounterMetricFamily]:
        """prometheus_client calls this on each scrape."""
        family = CounterMetricFamily(self._metric.name, self._metric.meaning, labels=self._metric.labels)
        for value, count in self._counts.items():
            family.add_metric([value], count)
        return [family]


class SpeedMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """The estimated speed of each worker's engine."""

    def __init__(self, speeds: WorkerSpeeds) -> None:
        self._speeds = speeds

    def collect(self) -> list[GaugeMetricFamily]:
        """prometheus_client calls this on each scrape."""
        family = gauge_family(names.ROUTER_ENGINE_SPEED)
        for worker_id, speed in self._speeds.all().items():
            for name, value in msgspec.structs.asdict(speed).items():
                if name.endswith("_s"):
                    family.add_metric([worker_id, name], value)
        return [family]


class LiveMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """Metrics read from the router's state on each scrape: requests in flight, the prefix index, the bus."""

    def __init__(
        self, in_flight: set[RequestContext], fleet: Fleet, kv: KvFeed, parity: ParityBook, bus: Bus, orphans: Orphans
    ) -> None:
        self._in_flight = in_flight
        self._fleet = fleet
        self._kv = kv
        self._parity = parity
        self._bus = bus
        self._orphans = orphans

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """prometheus_client calls this on each scrape."""
        in_flight = gauge_family(names.ROUTER_IN_FLIGHT)
        in_flight.add_metric([], len(self._in_flight))
        orphans = CounterMetricFamily(names.ROUTER_ORPHANS.name, names.ROUTER_ORPHANS.meaning, labels=("kind",))
        orphans.add_metric(["served"], self._orphans.served)
        orphans.add_metric(["awaited"], self._orphans.awaited)
        counts = self._bus.counts
        return [
            in_flight,
            orphans,
            *self._index_families(),
            self._parity_family(),
            counter_family(names.ROUTER_SNAPSHOTS, self._kv.snapshots),
            counter_family(names.BUS_DROPPED, counts.dropped),
            counter_family(names.BUS_BAD, counts.bad_messages),
            counter_family(names.BUS_PARTS_LOST, counts.parts_lost),
            counter_family(names.BUS_RECONNECTS, counts.reconnects),
        ]

    def _index_families(self) -> list[GaugeMetricFamily]:
        states, blocks = gauge_family(names.ROUTER_INDEX_STATE), gauge_family(names.ROUTER_INDEX_BLOCKS)
        for worker_id, entry in self._fleet.index.entries.items():
            blocks.add_metric([worker_id], self._fleet.index.count(worker_id))
            for state in IndexState:
                states.add_metric([worker_id, state.value], float(entry.state is state))
        return [states, blocks]

    def _parity_family(self) -> GaugeMetricFamily:
        family = gauge_family(names.ROUTER_TOKEN_PARITY)
        for worker_id in self._fleet.cluster.workers.keys() & self._parity.states.keys():
            for parity in Parity:
                family.add_metric([worker_id, parity.value], float(self._parity.parity(worker_id) is parity))
        return family


def gauge_family(metric: Metric) -> GaugeMetricFamily:
    """An empty family."""
    return GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)


def counter_family(metric: Metric, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(metric.name, metric.meaning, value=value)


def health_of(index: PrefixIndex, parity: ParityBook) -> RouterHealth:
    """The health that a router reports with its status: the workers whose state it does not know exactly."""
    inexact = ((worker_id, one.state) for worker_id, one in index.entries.items() if one.state is not IndexState.EXACT)
    differing = (worker_id for worker_id, one in parity.states.items() if one.parity is Parity.DIFFERS)
    return RouterHealth(
        not_exact={worker_id: state.value for worker_id, state in islice(inexact, ROUTER_TROUBLES_MAX)},
        tokens_differ=list(islice(differing, ROUTER_TROUBLES_MAX)),
        is_index_compiled=block_table.IS_COMPILED,
        is_placement_compiled=compiled.IS_COMPILED,
    )
