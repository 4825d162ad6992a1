"""Metrics for Prometheus: prometheus_client's objects for a process's own, and plain data for a process that exposes
the reports of others, also over OTLP.

A series that is not in the list of plain data disappears, which prometheus_client's counter objects do not support.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PrometheusFamily

from shared.telemetry.metrics import Kind, Metric

PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """A counter; prometheus_client adds ``_total`` itself."""
    return Counter(metric.name.removesuffix("_total"), metric.meaning, metric.labels, registry=registry)


def gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    """A gauge."""
    return Gauge(metric.name, metric.meaning, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """A histogram with the metric's buckets."""
    return Histogram(metric.name, metric.meaning, metric.labels, buckets=metric.buckets, registry=registry)


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
    """All series of one metric."""

    metric: Metric
    samples: Sequence[Sample]


def to_prometheus(families: Iterable[Family]) -> bytes:
    """The families in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return bytes(generate_latest(registry))


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
