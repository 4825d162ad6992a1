"""Whether requests go where they should: what placement knew, what it expected, what came of it."""

from __future__ import annotations

from observability.grafana.panels import Panel, average, gauge, graph, quantiles, rate, share, stat
from shared.telemetry import names

BY_ROUTER = "instance"

PLACEMENT = (
    stat(
        "Workers with an exact index",
        gauge(names.ROUTER_INDEX_STATE, where='state="exact"'),
        "Of all routers together. Good: ready workers times routers.",
    ),
    stat(
        "Workers whose tokens differ",
        gauge(names.ROUTER_TOKEN_PARITY, where='state="differs"'),
        "Good: 0. Their models are placed by load alone; the router's log says which probe differed.",
        bad=1,
    ),
    stat(
        "Cached, of prompt tokens",
        share(rate(names.FLEET_CACHED_ACTUAL), rate(names.FLEET_PROMPT_TOKENS)),
        "Prompt tokens that the worker that computed the rest had already. What is good depends on the traffic.",
        "percentunit",
    ),
    stat(
        "Prediction missed by",
        share(rate(names.FLEET_CACHED_MISSED), rate(names.FLEET_PROMPT_TOKENS)),
        "Distance between cached tokens expected and found, of prompt tokens. Good: below 5%.",
        "percentunit",
        bad=0.1,
    ),
    stat(
        "Requests waiting",
        gauge(names.ROUTER_QUEUE),
        "In the routers' queues, from which they can still go anywhere. Good: 0 most of the time.",
    ),
    stat(
        "Compiled indexes",
        gauge(names.ROUTER_INDEX_COMPILED),
        "Routers with the compiled prefix index. Good: all; the one in Python is several times slower.",
    ),
    graph(
        "Placements/s by reason",
        "short",
        {"{{mode}}: {{why}}": rate(names.ROUTER_PLACEMENTS, "mode, why")},
        "What placement decided and why. `baton explain ID` tells of one request what was weighed.",
    ),
    Panel(
        title="Predicted TTFT / measured",
        unit="short",
        queries=quantiles(names.ROUTER_TTFT_PREDICTED, "mode"),
        meaning="Good: the median is near 1. Else the learned speeds are wrong, or something slows the engines.",
    ),
    graph(
        "Learned speeds",
        "s",
        {"{{worker_id}} {{parameter}}": average(names.ROUTER_ENGINE_SPEED, "worker_id, parameter")},
        "What a step, a token or a pair of tokens takes. Good: steady. A jump: an engine changed or is disturbed.",
    ),
    graph(
        "Cached tokens/s: expected and found",
        "short",
        {"expected": rate(names.FLEET_CACHED_PREDICTED), "found": rate(names.FLEET_CACHED_ACTUAL)},
        "Good: one on the other. Found below expected: blocks are evicted before they are used.",
    ),
    graph(
        "Cached tokens/s: distance between the two",
        "short",
        {"missed": rate(names.FLEET_CACHED_MISSED)},
        "Errors both ways, which do not cancel out here. Good: small beside the tokens found.",
    ),
    graph(
        "Distance by worker",
        "short",
        {"{{worker_id}} ({{role}})": rate(names.WORKER_CACHED_MISSED, "worker_id, role")},
        "Tokens/s, by the worker that computed the prompt: its cache differs from what routers expect.",
    ),
    graph(
        "State of the prefix index",
        "short",
        {"{{state}}": gauge(names.ROUTER_INDEX_STATE, "state")},
        "Workers by what routers know of their caches. Good: exact. degraded waits for a snapshot.",
    ),
    graph(
        "Blocks in the prefix index",
        "short",
        {"{{instance}} {{worker_id}}": gauge(names.ROUTER_INDEX_BLOCKS, "instance, worker_id")},
        "That a router knows of a worker. Good: the same at all routers.",
    ),
    graph(
        "Snapshots/s",
        "short",
        {"{{instance}}": rate(names.ROUTER_SNAPSHOTS, BY_ROUTER)},
        "Asked for because a worker came or events were missed. Good: 0 while no worker comes.",
    ),
    graph(
        "Time to choose workers",
        "s",
        quantiles(names.ROUTER_PLACEMENT, BY_ROUTER),
        "Good: below a millisecond. It grows with the fleet and when the router has too little CPU.",
    ),
    graph(
        "Wait for a turn",
        "s",
        quantiles(names.ROUTER_ADMISSION, BY_ROUTER),
        "Of requests that had to wait in the router, until it was decided. Empty while none has to.",
    ),
    Panel(
        title="Queue, of what it may hold",
        unit="percentunit",
        queries={"{{instance}}": share(gauge(names.ROUTER_QUEUE, BY_ROUTER), gauge(names.ROUTER_QUEUE_MAX, BY_ROUTER))},
        meaning="At 100% the least urgent are refused with 503 or 429. Before that, add workers.",
        warn=0.5,
        bad=0.8,
    ),
    graph(
        "Legs that one side forgot",
        "short",
        {"{{instance}} {{kind}}": rate(names.ROUTER_ORPHANS, "instance, kind")},
        "Per second: served but not awaited, or awaited but not served. Good: 0, except when a router has just died.",
    ),
    graph(
        "Token parity",
        "short",
        {"{{state}}": gauge(names.ROUTER_TOKEN_PARITY, "state")},
        "Workers by whether routers make the same tokens as they do. Good: agrees.",
    ),
    graph(
        "Other routers heard",
        "short",
        {"{{instance}}": gauge(names.ROUTER_PEERS, BY_ROUTER)},
        "Good: one less than there are. They tell each other what they have just placed.",
    ),
)
