"""Grafana's JSON model of a dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from observability.grafana.panels import VARIABLES, Panel

PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
TEMPO = {"type": "tempo", "uid": "tempo"}
GRID_COLUMNS = 24
PANEL_HEIGHT = 7
STAT_HEIGHT = 4
TRACES_SHOWN = 20
QUOTED_VARIABLE = re.compile(re.escape(quote("${")) + "(__[A-Za-z.]+)" + re.escape(quote("}")))
"""A variable that Grafana fills in on a click, after URL quoting."""


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
