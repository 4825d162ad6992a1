"""Metrics for Prometheus: a process's own, and plain data for a process that exposes the reports of others, also over
OTLP.

A process counts in plain numbers, which become prometheus_client's families when Prometheus asks. Its counter objects
take a lock and several calls for each increment: too much for a dozen increments per request. Series that are not in
the list of plain data disappear, which these objects do not support either.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from shared.telemetry.metrics import Kind, Metric

disable_created_metrics()
"""A series has no sample of when it was made: the text format shows these as gauges, one more for each series."""


class Count:
    """One series of a counter: add to its ``value``."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add_to(self, family: PrometheusFamily, labels: dict[str, str]) -> None:
        family.add_sample(f"{family.name}_total", labels, self.value)


class Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_exemplars", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._exemplars: dict[int, Exemplar] = {}
        self.counts = [0] * (len(bounds) + 1)
        """Counts by bound, not cumulative; the last is of values above all bounds."""
        self.sum = 0.0

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count a value; the trace, if there is one, becomes the exemplar of its bucket."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace_id:
            self.exemplify(value, trace_id)

    def exemplify(self, value: float, trace_id: str) -> None:
        """Make the trace the exemplar of the value's bucket, without counting the value."""
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar({"trace_id": trace_id}, value, time.time())

    def add_to(self, family: PrometheusFamily, labels: dict[str, str]) -> None:
        total = 0
        for number, bound in enumerate((*self._bounds, float("inf"))):
            total += self.counts[number]
            le = {**labels, "le": floatToGoString(bound)}
            family.add_sample(f"{family.name}_bucket", le, total, exemplar=self._exemplars.get(number))
        family.add_sample(f"{family.name}_count", labels, total)
        family.add_sample(f"{family.name}_sum", labels, self.sum)


class Shown(Protocol):
    """A series."""

    def add_to(self, family: PrometheusFamily, labels: dict[str, str]) -> None:
        """Add the samples of this series."""


S = TypeVar("S", bound=Shown)


class SeriesByLabels(Generic[S]):
    """All series of one metric, shown by a registry."""

    def __init__(self, metric: Metric, registry: CollectorRegistry, make: Callable[[], S]) -> None:
        self._metric = metric
        self._make = make
        self._series: dict[tuple[object, ...], S] = {}
        if not metric.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: object) -> S:
        """The series with these values of the metric's labels, in their order."""
        try:
            return self._series[values]
        except KeyError:
            made = self._series[values] = self._make()
            return made

    def collect(self) -> Iterator[PrometheusFamily]:
        """prometheus_client calls this on each scrape."""
        metric = self._metric
        family = PrometheusFamily(metric.name.removesuffix("_total"), metric.meaning, metric.kind.value)
        for values, series in self._series.items():
            series.add_to(family, dict(zip(metric.labels, map(str, values), strict=True)))
        yield family


def counter(metric: Metric, registry: CollectorRegistry) -> SeriesByLabels[Count]:
    return SeriesByLabels(metric, registry, Count)


def gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(metric.name, metric.meaning, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> SeriesByLabels[Buckets]:
    return SeriesByLabels(metric, registry, lambda: Buckets(metric.buckets))


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's value. ``counts`` are per bucket, with one more bucket than the metric has bounds."""

    counts: Sequence[int]
    sum: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: a value for each of the metric's labels, in their order, and its number."""

    labels: tuple[str, ...]
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class Family:
    metric: Metric
    samples: Sequence[Sample]


def page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The registry's page and its content type: OpenMetrics, which has exemplars, where the Accept header takes it,
    otherwise Prometheus's text format.
    """
    encode, content_type = choose_encoder(accept)
    return bytes(encode(registry)), content_type


def to_prometheus(families: Iterable[Family], accept: str = "") -> tuple[bytes, str]:
    """The families as ``page`` shows them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return page(registry, accept)


class _Given:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[PrometheusFamily]:
        return (_prometheus_family(family) for family in self._families)


def _prometheus_family(family: Family) -> PrometheusFamily:
    metric = family.metric
    shown: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    match metric.kind:
        case Kind.COUNTER:
            shown = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        case Kind.GAUGE:
            shown = GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        case Kind.HISTOGRAM:
            shown = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for sample in family.samples:
        if isinstance(sample.value, Distribution):
            bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
            cumulative = accumulate(sample.value.counts)
            shown.add_metric(sample.labels, list(zip(bounds, cumulative, strict=True)), sample.value.sum)
        else:
            shown.add_metric(sample.labels, sample.value)
    return shown
