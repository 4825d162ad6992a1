"""What a dashboard's panels ask Prometheus: PromQL made of the metrics' own names and labels.

Every selector lets the page's variables choose, as far as the metric has their labels: what one looks at is said
once, at the top of a page, and holds for all of its panels.
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
"""Label -> the metric that has all of its values, and what it is called on the page."""
OF_ROUTERS = "baton_router_"
"""How the names of metrics begin of which each router has its own, told apart by what Prometheus scraped."""
HOUR = "1h"
WINDOW = "$__rate_interval"
"""Grafana's own: what is shown at this zoom, and never less than four scrapes."""
MINUTES = "5m"
"""For what is rare, or a ratio."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A graph of some expressions, each with the legend of its series. ``unit`` is Grafana's."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Legend -> PromQL."""
    meaning: str
    """What it shows, what is good, and where to look when it is not."""
    kind: str = "timeseries"
    width: int = 8
    warn: float | None = None
    """From here on it is worth a look."""
    bad: float | None = None
    """From here on something is wrong."""
    traces: str = ""
    """TraceQL behind a click on a point: the requests that it is about."""


def stat(title: str, expr: str, meaning: str, unit: str = "short", bad: float | None = None) -> Panel:
    """One number."""
    return Panel(title=title, unit=unit, queries={"": expr}, meaning=meaning, kind="stat", width=4, bad=bad)


def graph(title: str, unit: str, queries: Mapping[str, str], meaning: str) -> Panel:
    """Series without thresholds."""
    return Panel(title=title, unit=unit, queries=queries, meaning=meaning)


def series(metric: Metric, where: str = "", suffix: str = "") -> str:
    """A metric's series, as far as the page's variables and ``where`` choose them."""
    labels = [*metric.labels, *(["instance"] if metric.name.startswith(OF_ROUTERS) else [])]
    chosen = [f'{label}=~"${label}"' for label in labels if label in VARIABLES]
    matchers = ",".join([*chosen, *([where] if where else [])])
    return f"{metric.name}{suffix}{{{matchers}}}" if matchers else f"{metric.name}{suffix}"


def rate(metric: Metric, by: str = "", where: str = "", window: str = WINDOW, suffix: str = "") -> str:
    """Growth per second, summed by labels."""
    return f"{_sum(by)} (rate({series(metric, where, suffix)}[{window}]))"


def increase(metric: Metric, by: str = "", where: str = "", window: str = HOUR) -> str:
    """Growth in a window, summed by labels."""
    return f"{_sum(by)} (increase({series(metric, where)}[{window}]))"


def gauge(metric: Metric, by: str = "", where: str = "") -> str:
    """The value now, summed by labels."""
    return f"{_sum(by)} ({series(metric, where)})"


def average(metric: Metric, by: str) -> str:
    """The value now, averaged over what is not told apart."""
    return f"avg by ({by}) ({series(metric)})"


def share(part: str, whole: str) -> str:
    """Part of a whole; nothing where there is none."""
    return f"{part} / ({whole} > 0)"


def failing(metric: Metric, by: str, where: str) -> str:
    """The part of what is counted that ``where`` chooses; 0, and not nothing, where there is none yet."""
    every = rate(metric, by)
    return share(f"({rate(metric, by, where)} or 0 * {every})", every)


def quantiles(metric: Metric, by: str) -> dict[str, str]:
    """Median and tails of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return {
        f"p{percent} {legend}": f"histogram_quantile({percent / 100:g}, {rate(metric, f'le, {by}', suffix='_bucket')})"
        for percent in (50, 95, 99)
    }


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"
