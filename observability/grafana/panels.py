"""Panels and their PromQL, built from the metrics in ``shared.telemetry.names``.

Each selector filters by all dashboard variables that are labels of its metric, so a choice at the top of a page
applies to all of its panels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.telemetry import names
from shared.telemetry.metrics import Metric

VARIABLES: Mapping[str, tuple[Metric, str]] = {
    "model": (names.FLEET_REQUESTS, "Model"),
    "mode": (names.FLEET_REQUESTS, "Mode"),
    "worker_id": (names.WORKER_RUNNING, "Worker"),
    "tenant": (names.ROUTER_TENANT_REQUESTS, "Tenant"),
    "instance": (names.ROUTER_IN_FLIGHT, "Router"),
}
"""Label -> the metric that provides its values, and the variable's title on the page."""
ROUTER_PREFIX = "baton_router_"
"""Each router exports these metrics; Prometheus' label ``instance`` identifies the router."""
HOUR = "1h"
WINDOW = "$__rate_interval"
"""Grafana's variable: depends on the zoom and is at least four scrape intervals."""
MINUTES = "5m"
"""For rare events."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A Grafana panel. ``unit`` is one of Grafana's unit ids."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Legend -> PromQL."""
    meaning: str
    """The panel's description: what it shows, which values are good, what to check otherwise."""
    kind: str = "timeseries"
    width: int = 8
    warn: float | None = None
    """Threshold for orange."""
    bad: float | None = None
    """Threshold for red."""
    traces: str = ""
    """TraceQL query that a click on a data point opens."""


def stat(title: str, expr: str, meaning: str, unit: str = "short", bad: float | None = None) -> Panel:
    """One number."""
    return Panel(title=title, unit=unit, queries={"": expr}, meaning=meaning, kind="stat", width=4, bad=bad)


def graph(title: str, unit: str, queries: Mapping[str, str], meaning: str) -> Panel:
    """Series without thresholds."""
    return Panel(title=title, unit=unit, queries=queries, meaning=meaning)


def series(metric: Metric, where: str = "", suffix: str = "") -> str:
    """Selector of a metric, filtered by the page's variables and ``where``."""
    labels = [*metric.labels, *(["instance"] if metric.name.startswith(ROUTER_PREFIX) else [])]
    variables = [f'{label}=~"${label}"' for label in labels if label in VARIABLES]
    matchers = ",".join([*variables, *([where] if where else [])])
    return f"{metric.name}{suffix}{{{matchers}}}" if matchers else f"{metric.name}{suffix}"


def rate(metric: Metric, by: str = "", where: str = "", window: str = WINDOW, suffix: str = "") -> str:
    """Rate per second, summed by labels."""
    return f"{_sum(by)} (rate({series(metric, where, suffix)}[{window}]))"


def increase(metric: Metric, by: str = "", where: str = "", window: str = HOUR) -> str:
    """Increase within a window, summed by labels."""
    return f"{_sum(by)} (increase({series(metric, where)}[{window}]))"


def gauge(metric: Metric, by: str = "", where: str = "") -> str:
    """Current value, summed by labels."""
    return f"{_sum(by)} ({series(metric, where)})"


def average(metric: Metric, by: str) -> str:
    """Current value, averaged by labels."""
    return f"avg by ({by}) ({series(metric)})"


def share(part: str, whole: str) -> str:
    """Ratio; no series while ``whole`` is 0."""
    return f"{part} / ({whole} > 0)"


def failing(metric: Metric, by: str, where: str) -> str:
    """Fraction of the events that match ``where``; 0 while none has matched yet."""
    whole = rate(metric, by)
    return share(f"({rate(metric, by, where)} or 0 * {whole})", whole)


def quantiles(metric: Metric, by: str) -> dict[str, str]:
    """p50, p95 and p99 of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return {
        f"p{percent} {legend}": f"histogram_quantile({percent / 100:g}, {rate(metric, f'le, {by}', suffix='_bucket')})"
        for percent in (50, 95, 99)
    }


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"
