"""Panels, their PromQL, built from the metrics in ``shared.telemetry.names``, and Grafana's JSON of a dashboard.

Each selector filters by all dashboard variables that are labels of its metric, so a choice at the top of a page
applies to all of its panels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

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
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
TEMPO = {"type": "tempo", "uid": "tempo"}
GRID_COLUMNS = 24
PANEL_HEIGHT = 7
STAT_HEIGHT = 4
TRACES_SHOWN = 20
QUOTED_VARIABLE = re.compile(re.escape(quote("${")) + "(__[A-Za-z.]+)" + re.escape(quote("}")))
"""A variable that Grafana fills in on a click, after URL quoting."""


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


def from_any(metric: Metric, by: str, where: str = "") -> str:
    """Current value, summed by labels, of a metric that every collector has from one source: each counts once."""
    return f"{_sum(by)} (max by ({', '.join(metric.labels)}) ({series(metric, where)}))"


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


def dashboard(title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    expressions = " ".join(expr for panel in panels for expr in panel.queries.values())
    return {
        "uid": f"baton-{slug(title)}",
        "title": f"Baton: {title}",
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"title": "Baton", "type": "dashboards", "tags": ["baton"], "asDropdown": True, "keepTime": True}],
        "templating": {"list": [_variable(label) for label in VARIABLES if f'"${label}"' in expressions]},
        "panels": _layout(panels),
    }


def slug(title: str) -> str:
    """The dashboard's name in URLs and file names."""
    return title.lower().replace(" ", "-")


def _variable(label: str) -> dict[str, Any]:
    metric, name = VARIABLES[label]
    query = f"label_values({metric.name}, {label})"
    return {
        "name": label,
        "label": name,
        "type": "query",
        "datasource": PROMETHEUS,
        "definition": query,
        "query": {"query": query, "refId": label},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _layout(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    x = y = row_height = 0
    placed = []
    for number, panel in enumerate(panels, start=1):
        height = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
        if x + panel.width > GRID_COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        placed.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
        x, row_height = x + panel.width, max(row_height, height)
    return placed


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": place,
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": PROMETHEUS,
                "expr": expr,
                "legendFormat": legend,
                # Exemplars are dots that link to the trace of one request. Only histograms have them.
                "exemplar": "_bucket" in expr,
            }
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    thresholds = [("orange", panel.warn), ("red", panel.bad)]
    steps = [{"color": color, "value": value} for color, value in thresholds if value is not None]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": "green", "value": None}, *steps]}
        defaults["color"] = {"mode": "thresholds"} if panel.kind == "stat" else {"mode": "palette-classic"}
    if steps and panel.kind != "stat":
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    if panel.traces:
        defaults["links"] = [{"title": "Traces of these requests", "url": _explore(panel.traces), "targetBlank": True}]
    return defaults


def _explore(traceql: str) -> str:
    """URL of Grafana's trace search, limited to the time range of the page."""
    pane = {
        "datasource": TEMPO["uid"],
        "queries": [
            {"refId": "A", "datasource": TEMPO, "queryType": "traceql", "query": traceql, "limit": TRACES_SHOWN}
        ],
        "range": {"from": "${__from}", "to": "${__to}"},
    }
    panes = QUOTED_VARIABLE.sub(r"${\1}", quote(json.dumps({"traces": pane}), safe=""))
    return f"/explore?schemaVersion=1&orgId=1&panes={panes}"
