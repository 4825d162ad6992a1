"""Placement dashboard: prefix index, predictions against measurements, decisions and the admission queue."""

from __future__ import annotations

from observability.grafana.panels import Panel, average, gauge, graph, quantiles, rate, share, stat
from shared.telemetry import names

BY_ROUTER = "instance"

PLACEMENT = (
    stat(
        "Workers with an exact index",
        gauge(names.ROUTER_INDEX_STATE, where='state="exact"'),
        "Sum over all routers. Good: number of ready workers times number of routers.",
    ),
    stat(
        "Workers whose tokens differ",
        gauge(names.ROUTER_TOKEN_PARITY, where='state="differs"'),
        "Good: 0. Routers place their models by load alone; the router's log says which probe differed.",
        bad=1,
    ),
    stat(
        "Cached prompt tokens",
        share(rate(names.FLEET_CACHED_ACTUAL), rate(names.FLEET_PROMPT_TOKENS)),
        "Fraction of prompt tokens in the prefix cache of the prefilling worker. A good value depends on traffic.",
        "percentunit",
    ),
    stat(
        "Cache prediction error",
        share(rate(names.FLEET_CACHED_MISSED), rate(names.FLEET_PROMPT_TOKENS)),
        "Difference between predicted and actual cached tokens, relative to prompt tokens. Good: below 5%.",
        "percentunit",
        bad=0.1,
    ),
    stat(
        "Requests waiting",
        gauge(names.ROUTER_QUEUE),
        "Requests in the routers' admission queues, not placed yet. Good: 0 most of the time.",
    ),
    stat(
        "Compiled indexes",
        gauge(names.ROUTER_INDEX_COMPILED),
        "Routers with the compiled prefix index. Good: all; the Python index is several times slower.",
    ),
    graph(
        "Placements/s by reason",
        "short",
        {"{{mode}}: {{why}}": rate(names.ROUTER_PLACEMENTS, "mode, why")},
        "Placements by mode and reason. `baton explain ID` shows the candidates of one request.",
    ),
    Panel(
        title="Predicted TTFT / measured",
        unit="short",
        queries=quantiles(names.ROUTER_TTFT_PREDICTED, "mode"),
        meaning="Good: median near 1. Otherwise the estimated speeds are wrong, or something slows the engines.",
    ),
    graph(
        "Estimated engine speeds",
        "s",
        {"{{worker_id}} {{parameter}}": average(names.ROUTER_ENGINE_SPEED, "worker_id, parameter")},
        "Time per step, per token or per token pair. Good: constant. A jump: an engine changed or is disturbed.",
    ),
    graph(
        "Cached tokens/s: predicted and actual",
        "short",
        {"predicted": rate(names.FLEET_CACHED_PREDICTED), "actual": rate(names.FLEET_CACHED_ACTUAL)},
        "Good: equal. Actual below predicted: blocks are evicted before they are used.",
    ),
    graph(
        "Cached tokens/s: prediction error",
        "short",
        {"error": rate(names.FLEET_CACHED_MISSED)},
        "Absolute errors: over- and underestimates do not cancel out. Good: small compared with actual tokens.",
    ),
    graph(
        "Cache prediction error by worker",
        "short",
        {"{{worker_id}} ({{role}})": rate(names.WORKER_CACHED_MISSED, "worker_id, role")},
        "Tokens/s by prefilling worker. High: the routers' index of this worker's cache is wrong.",
    ),
    graph(
        "State of the prefix index",
        "short",
        {"{{state}}": gauge(names.ROUTER_INDEX_STATE, "state")},
        "Workers by the state of their prefix index. Good: exact. degraded: the router waits for a snapshot.",
    ),
    graph(
        "Blocks in the prefix index",
        "short",
        {"{{instance}} {{worker_id}}": gauge(names.ROUTER_INDEX_BLOCKS, "instance, worker_id")},
        "Blocks of each worker in a router's index. Good: equal on all routers.",
    ),
    graph(
        "Snapshots/s",
        "short",
        {"{{instance}}": rate(names.ROUTER_SNAPSHOTS, BY_ROUTER)},
        "Requested for new workers or after missed events. Good: 0 while no worker joins.",
    ),
    graph(
        "Time to choose workers",
        "s",
        quantiles(names.ROUTER_PLACEMENT, BY_ROUTER),
        "Good: below 1 ms. Grows with the fleet and when the router has too little CPU.",
    ),
    graph(
        "Time in the admission queue",
        "s",
        quantiles(names.ROUTER_ADMISSION, BY_ROUTER),
        "Of queued requests, until they are placed or refused. Empty while no request is queued.",
    ),
    Panel(
        title="Admission queue utilization",
        unit="percentunit",
        queries={"{{instance}}": share(gauge(names.ROUTER_QUEUE, BY_ROUTER), gauge(names.ROUTER_QUEUE_MAX, BY_ROUTER))},
        meaning="At 100% the router refuses the least urgent requests with 503 or 429. Add workers before that.",
        warn=0.5,
        bad=0.8,
    ),
    graph(
        "Orphaned request legs/s",
        "short",
        {"{{instance}} {{kind}}": rate(names.ROUTER_ORPHANS, "instance, kind")},
        "served: known only to the worker. awaited: known only to the router. Good: 0, except after a router crash.",
    ),
    graph(
        "Token parity",
        "short",
        {"{{state}}": gauge(names.ROUTER_TOKEN_PARITY, "state")},
        "Workers by whether their tokens equal the routers' tokens. Good: agrees.",
    ),
    graph(
        "Other routers connected",
        "short",
        {"{{instance}}": gauge(names.ROUTER_PEERS, BY_ROUTER)},
        "Good: number of routers minus 1. Routers tell each other their latest placements.",
    ),
)
