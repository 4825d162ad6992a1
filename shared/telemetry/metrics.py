"""What a metric is; ``names`` lists them all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip

ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class Kind(StrEnum):
    """Prometheus' kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric as Prometheus sees it. Counters end in ``_total``; seconds and bytes are in the name."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LISTED: dict[str, Metric] = {}
"""Every metric by its name, once ``names`` is imported."""


def listed(metric: Metric) -> Metric:
    """The metric, now that it is listed. Raises ValueError when its name is."""
    if metric.name in LISTED:
        raise ValueError(f"{metric.name} is listed twice")
    LISTED[metric.name] = metric
    return metric


def counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    """A number that grows."""
    return listed(Metric(name=name, kind=Kind.COUNTER, unit=unit, meaning=meaning, labels=labels))


def gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    """A number as it is now."""
    return listed(Metric(name=name, kind=Kind.GAUGE, unit=unit, meaning=meaning, labels=labels))


def seconds(name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Metric:
    """A histogram of durations."""
    return listed(
        Metric(name=name, kind=Kind.HISTOGRAM, unit="seconds", meaning=meaning, labels=labels, buckets=buckets)
    )


def token_seconds(name: str, meaning: str, *labels: str) -> Metric:
    """A histogram of the times between tokens."""
    return seconds(name, meaning, *labels, buckets=ITL_BUCKETS_S)
