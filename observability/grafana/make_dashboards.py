"""Writes the Grafana dashboards: ``python -m observability.grafana.make_dashboards``.

Panels are one line each, with metric names taken from ``shared.telemetry.names``; Grafana's JSON is only their form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.telemetry import names
from shared.telemetry.metrics import Metric

DASHBOARDS = Path(__file__).parent / "dashboards"
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
GRID_COLUMNS = 24
PANEL_HEIGHT = 7
STAT_HEIGHT = 4


@dataclass(frozen=True)
class Panel:
    """A graph of some expressions, each with the legend of its series. ``unit`` is Grafana's."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Legend -> PromQL."""
    kind: str = "timeseries"
    width: int = 8


def stat(title: str, expr: str, unit: str = "short") -> Panel:
    """One number."""
    return Panel(title, unit, {"": expr}, kind="stat", width=4)


def rate(metric: Metric, by: str = "", where: str = "") -> str:
    """Growth per second, summed by labels."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric.name}{{{where}}}[1m]))" if where else f"{grouped} (rate({metric.name}[1m]))"


def gauge(metric: Metric, by: str = "") -> str:
    """The value now, summed by labels."""
    return f"sum by ({by}) ({metric.name})" if by else f"sum ({metric.name})"


def quantiles(metric: Metric, by: str) -> dict[str, str]:
    """Median and tails of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return {
        f"p{percent} {legend}": (
            f"histogram_quantile({percent / 100:g}, sum by (le, {by}) (rate({metric.name}_bucket[1m])))"
        )
        for percent in (50, 95, 99)
    }


WORKER = "{{worker_id}} ({{role}})"
STORE = "{{worker_id}}"
BY_WORKER = "worker_id, role"
READY = f'sum ({names.FLEET_WORKERS.name}{{phase="ready"}})'
DECODE_COMPUTED = rate(names.WORKER_PROMPT_TOKENS, BY_WORKER, 'role="decode",source="computed"')
DECODE_REQUESTS = rate(names.WORKER_REQUESTS, BY_WORKER, 'role="decode"')
RECEIVED_BYTES = rate(names.WORKER_RECEIVED_BYTES, BY_WORKER)
RECEIVING_SECONDS = rate(names.WORKER_RECEIVED_SECONDS, BY_WORKER)
BY_TIER, BY_KIND = "worker_id, tier", "worker_id, kind, outcome"
STORE_FULL = f"{gauge(names.STORE_BLOCKS, BY_TIER)} / ({gauge(names.STORE_BLOCKS_MAX, BY_TIER)} > 0)"
STORE_LOSSES = f'sum by ({BY_KIND}) (increase({names.STORE_MOVED.name}{{outcome!="done"}}[1h]))'

FLEET = (
    stat("Ready workers", READY),
    stat("Lost in an hour", f"sum (increase({names.FLEET_WORKERS_LOST.name}[1h]))"),
    stat("Requests/s", gauge(names.FLEET_REQUEST_RATE), "reqps"),
    stat("Prompt tokens/s", gauge(names.FLEET_TOKENS_IN)),
    stat("Completion tokens/s", gauge(names.FLEET_TOKENS_OUT)),
    stat("Leader's term", f"max ({names.FLEET_TERM.name})"),
    Panel("Workers by phase", "short", {"{{role}} {{phase}}": gauge(names.FLEET_WORKERS, "role, phase")}),
    Panel(
        "Phase of each worker", "short", {WORKER + " {{phase}}": gauge(names.WORKER_PHASE, "worker_id, role, phase")}
    ),
    Panel("Silence", "s", {WORKER: gauge(names.WORKER_SILENCE, BY_WORKER)}),
    Panel("Running", "short", {WORKER: gauge(names.WORKER_RUNNING, BY_WORKER)}),
    Panel("Waiting", "short", {WORKER: gauge(names.WORKER_WAITING, BY_WORKER)}),
    Panel("Waiting prompt tokens", "short", {WORKER: gauge(names.WORKER_WAITING_TOKENS, BY_WORKER)}),
    Panel("KV blocks in use", "percentunit", {WORKER: gauge(names.WORKER_KV_USED, BY_WORKER)}),
    Panel("Tokens generated", "short", {WORKER: rate(names.WORKER_GENERATION_TOKENS, BY_WORKER)}),
    Panel("Legs", "short", {WORKER: gauge(names.WORKER_LEGS, BY_WORKER)}),
    Panel("Prefill speed (tokens/s)", "short", {WORKER: gauge(names.WORKER_PREFILL_SPEED, BY_WORKER)}),
    Panel("Time between tokens", "s", {WORKER: gauge(names.WORKER_TOKEN_INTERVAL, BY_WORKER)}),
    Panel("Preemptions", "short", {WORKER: rate(names.WORKER_PREEMPTIONS, BY_WORKER)}),
    Panel("Workers wanted by the planner", "short", {"{{model}} {{role}}": gauge(names.PLANNER_WANTED, "model, role")}),
    Panel("Load by role", "percentunit", {"{{model}} {{role}}": gauge(names.PLANNER_LOAD, "model, role")}),
    Panel("Planner's changes", "short", {"{{action}} {{role}}": rate(names.PLANNER_CHANGES, "action, role")}),
    Panel("Processes", "short", {"{{service}} {{phase}}": gauge(names.SERVICE_PHASE, "service, phase")}),
    Panel("Messages dropped", "short", {"{{instance}}": rate(names.BUS_DROPPED, "instance")}),
    Panel("Reconnections to NATS", "short", {"{{instance}}": rate(names.BUS_RECONNECTS, "instance")}),
)

REQUESTS = (
    Panel("Requests/s by status", "reqps", {"{{mode}} {{status}}": rate(names.FLEET_REQUESTS, "mode, status")}),
    Panel("Requests in flight", "short", {"{{instance}}": gauge(names.ROUTER_IN_FLIGHT, "instance")}),
    Panel("Failures by reason", "reqps", {"{{reason}}": rate(names.FLEET_FAILURES, "reason")}),
    Panel("TTFT", "s", quantiles(names.FLEET_TTFT, "mode")),
    Panel("ITL", "s", quantiles(names.FLEET_ITL, "mode")),
    Panel("E2E", "s", quantiles(names.FLEET_E2E, "mode")),
    Panel("TTFT by decode worker", "s", quantiles(names.WORKER_TTFT, "worker_id")),
    Panel("ITL by decode worker", "s", quantiles(names.WORKER_ITL, "worker_id")),
    Panel("E2E by decode worker", "s", quantiles(names.WORKER_E2E, "worker_id")),
    Panel("Tokens/s of ended requests", "short", {"{{kind}}": rate(names.FLEET_REQUEST_TOKENS, "kind")}),
    Panel(
        "Requests/s by decode worker",
        "reqps",
        {WORKER + " {{mode}}": rate(names.WORKER_REQUESTS, "worker_id, role, mode")},
    ),
    Panel(
        "Placed again, and resumed",
        "short",
        {
            "{{reason}}": rate(names.ROUTER_RETRIES, "reason"),
            "{{reason}}, resumed": rate(names.ROUTER_RESUMES, "reason"),
        },
    ),
    Panel("Time to choose workers", "s", quantiles(names.ROUTER_PLACEMENT, "instance")),
)

KV_EXCHANGE = (
    Panel("Where prompts' KV came from (tokens/s)", "short", {"{{source}}": rate(names.FLEET_PROMPT_TOKENS, "source")}),
    Panel("By worker", "short", {WORKER + " {{source}}": rate(names.WORKER_PROMPT_TOKENS, "worker_id, role, source")}),
    Panel("KV received", "Bps", {WORKER: RECEIVED_BYTES}),
    Panel(
        "Bandwidth while receiving",
        "Bps",
        {WORKER: f"{RECEIVED_BYTES} / ({RECEIVING_SECONDS} > 0)"},
    ),
    Panel(
        "Prompt tokens computed per request on decode workers",
        "short",
        {WORKER: f"{DECODE_COMPUTED} / ({DECODE_REQUESTS} > 0)"},
    ),
    Panel("KV received in an hour", "bytes", {"received": f"sum (increase({names.FLEET_RECEIVED_BYTES.name}[1h]))"}),
    Panel(
        "Cached tokens: expected and found",
        "short",
        {"expected": rate(names.FLEET_CACHED_PREDICTED), "found": rate(names.FLEET_CACHED_ACTUAL)},
    ),
    Panel("Cached tokens: distance between the two", "short", {"missed": rate(names.FLEET_CACHED_MISSED)}),
    Panel("Predicted TTFT / measured", "short", quantiles(names.ROUTER_TTFT_PREDICTED, "mode")),
    Panel("State of the prefix index", "short", {"{{state}}": gauge(names.ROUTER_INDEX_STATE, "state")}),
    Panel("Leases held", "short", {WORKER: gauge(names.WORKER_LEASES_HELD, BY_WORKER)}),
    Panel("Blocks pinned by leases", "short", {WORKER: gauge(names.WORKER_PINNED, BY_WORKER)}),
    Panel("Leases/s by outcome", "short", {"{{outcome}}": rate(names.WORKER_LEASES, "outcome")}),
    Panel("Reads under way", "short", {WORKER: gauge(names.WORKER_READS_RUNNING, BY_WORKER)}),
    Panel(
        "Reads/s by outcome", "short", {WORKER + " {{outcome}}": rate(names.WORKER_READS, "worker_id, role, outcome")}
    ),
    Panel("Handoffs/s", "reqps", {"{{handoff}}": rate(names.FLEET_HANDOFFS, "handoff")}),
    Panel("Waiting for KV", "s", quantiles(names.FLEET_KV_WAIT, "handoff")),
    Panel("Reading KV", "s", quantiles(names.FLEET_KV_READ, "handoff")),
    Panel(
        "Prompt tokens/s computed twice",
        "short",
        {
            WORKER + " silent re-prefill": rate(names.WORKER_RECOMPUTED, BY_WORKER),
            "decode workers, tails and all": rate(names.FLEET_RECOMPUTED),
            "after preemptions": rate(names.FLEET_REPREFILLED),
        },
    ),
    Panel("Read back instead of computed (tokens/s)", "short", {"read back": rate(names.FLEET_READBACK)}),
    Panel("Refused for lack of cache", "reqps", {WORKER: rate(names.WORKER_REFUSED, BY_WORKER)}),
    Panel("Blocks in stores", "short", {STORE + " {{tier}}": gauge(names.STORE_BLOCKS, BY_TIER)}),
    Panel("KV in stores", "bytes", {STORE + " {{tier}}": gauge(names.STORE_BYTES, BY_TIER)}),
    Panel("How full stores are", "percentunit", {STORE + " {{tier}}": STORE_FULL}),
    Panel(
        "KV that stores take and give",
        "Bps",
        {
            STORE + " takes": rate(names.WORKER_RECEIVED_BYTES, "worker_id", 'role="store"'),
            STORE + " gives": rate(names.STORE_GRANTED, "worker_id"),
        },
    ),
    Panel(
        "Blocks/s that stores load and save",
        "short",
        {STORE + " {{kind}} {{outcome}}": rate(names.STORE_MOVED, BY_KIND)},
    ),
    Panel(
        "Blocks that stores are to load and save",
        "short",
        {STORE + " {{kind}}": gauge(names.STORE_WAITING, "worker_id, kind")},
    ),
    Panel("Blocks/s that stores evict", "short", {STORE + " {{tier}}": rate(names.STORE_EVICTED, BY_TIER)}),
    Panel("Blocks that stores lost in an hour", "short", {STORE + " {{kind}} {{outcome}}": STORE_LOSSES}),
)

PAGES: Mapping[str, Sequence[Panel]] = {"Fleet": FLEET, "Requests": REQUESTS, "KV exchange": KV_EXCHANGE}


def dashboard(title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """One page as Grafana reads it."""
    return {
        "uid": f"baton-{_slug(title)}",
        "title": f"Baton: {title}",
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": _laid_out(panels),
    }


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    x = y = row_height = 0
    laid_out = []
    for number, panel in enumerate(panels, start=1):
        height = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
        if x + panel.width > GRID_COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        laid_out.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
        x, row_height = x + panel.width, max(row_height, height)
    return laid_out


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "gridPos": place,
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": PROMETHEUS, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def pages() -> dict[str, str]:
    """File name -> its text."""
    return {
        f"{_slug(title)}.json": json.dumps(dashboard(title, panels), indent=1) + "\n" for title, panels in PAGES.items()
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DASHBOARDS / name).write_text(text)
