"""What Prometheus reads of the router when it asks: requests in flight, the prefix index, engine speeds, the bus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from services.router.feeds.kv import KvFeed
from services.router.placement import native
from services.router.placement.fleet import Fleet
from services.router.request.context import RequestContext
from services.router.state import block_table
from services.router.state.prefix_index import IndexState, PrefixIndex
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.tokenize import words
from services.router.tokenize.parity import Parity, ParityBook
from shared import compiled as request_path
from shared.bus.leg_inbox import Orphans
from shared.bus.port import Bus
from shared.contracts.control import ROUTER_TROUBLES_MAX, RouterHealth
from shared.telemetry import names
from shared.telemetry.metrics import Metric
from shared.telemetry.prometheus import Buckets


class CountedGaps(Protocol):
    """See ``request_metrics.Gaps``."""

    @property
    def buckets(self) -> Buckets:
        """What is counted."""

    def count(self) -> None:
        """Count what is not yet."""


class GapMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """Times between the pieces of streams, by mode."""

    def __init__(self, of: Mapping[str, CountedGaps]) -> None:
        self._of = of

    def collect(self) -> list[HistogramMetricFamily]:
        """prometheus_client calls this on each scrape."""
        family = HistogramMetricFamily(names.ROUTER_ITL.name, names.ROUTER_ITL.meaning, labels=names.ROUTER_ITL.labels)
        for mode, gaps in self._of.items():
            gaps.count()
            gaps.buckets.add_to(family, {"mode": mode})
        return [family]


class CatchUp(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """Registered before all others, it calls ``catch_up`` on each scrape before they are read."""

    def __init__(self, catch_up: Callable[[], None]) -> None:
        self._catch_up = catch_up

    def collect(self) -> list[CounterMetricFamily]:
        """prometheus_client calls this on each scrape."""
        self._catch_up()
        return []


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


def health_of(index: PrefixIndex, parity: ParityBook, failures: Iterable[tuple[str, str]] = ()) -> RouterHealth:
    """The health that a router reports with its status: the workers whose state it does not know exactly, and the
    models whose tokenizer failed, each with the reason.
    """
    inexact = ((worker_id, one.state) for worker_id, one in index.entries.items() if one.state is not IndexState.EXACT)
    differing = (worker_id for worker_id, one in parity.states.items() if one.parity is Parity.DIFFERS)
    return RouterHealth(
        not_exact={worker_id: state.value for worker_id, state in islice(inexact, ROUTER_TROUBLES_MAX)},
        tokens_differ=list(islice(differing, ROUTER_TROUBLES_MAX)),
        tokenizers_failed=dict(islice(failures, ROUTER_TROUBLES_MAX)),
        is_index_compiled=block_table.IS_COMPILED,
        is_placement_compiled=native.IS_COMPILED,
        is_tokenization_compiled=words.IS_COMPILED,
        is_request_path_compiled=request_path.IN_USE,
    )
