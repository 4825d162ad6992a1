"""prometheus_client objects for the metrics in ``names``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.telemetry.metrics import Metric


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """A counter; prometheus_client adds ``_total`` itself."""
    return Counter(metric.name.removesuffix("_total"), metric.meaning, metric.labels, registry=registry)


def gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    """A gauge."""
    return Gauge(metric.name, metric.meaning, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """A histogram with the metric's buckets."""
    return Histogram(metric.name, metric.meaning, metric.labels, buckets=metric.buckets, registry=registry)
