"""Requests dashboard: rates, errors and latencies of the fleet and of each decode worker. Tenants dashboard: requests,
tokens and refusals of each tenant. Placement dashboard: prefix index, predictions against measurements, decisions and
the admission queue.
"""

from __future__ import annotations

from observability.grafana.page_fleet import WORKER
from observability.grafana.panels import (
    WINDOW,
    Panel,
    average,
    failing,
    from_any,
    gauge,
    graph,
    increase,
    quantiles,
    rate,
    share,
    stat,
)
from shared.telemetry import names

SLOW_TTFT = '{ name = "first token" && duration > ${__value.raw}s }'
SLOW_REQUEST = '{ resource.service.name = "baton-router" && name = "request" && duration > ${__value.raw}s }'
ALL = '{ resource.service.name = "baton-router" && name = "request" }'
FAILED = '{ resource.service.name = "baton-router" && name = "request" && status = error }'
MET, TARGETED = 'goal="met"', 'goal!="no_target"'
ERRORS = 'status=~"5.."'
TTFT_WARN_S, TTFT_BAD_S = 1.0, 2.0
ITL_WARN_S, ITL_BAD_S = 0.05, 0.1

REQUESTS = (
    graph(
        "Requests/s by status",
        "reqps",
        {"{{mode}} {{status}}": rate(names.FLEET_REQUESTS, "mode, status")},
        "Good: 200. 4xx: client errors or rate limits; 499: the client disconnected; 5xx: errors of Baton.",
    ),
    Panel(
        title="Errors",
        unit="percentunit",
        queries={"{{model}}": failing(names.FLEET_REQUESTS, "model", ERRORS)},
        meaning="Fraction of requests with a 5xx response. Good: 0.",
        warn=0.01,
        bad=0.05,
        traces=FAILED,
    ),
    graph(
        "Failures by reason",
        "reqps",
        {"{{reason}}": rate(names.FLEET_FAILURES, "reason")},
        "Failed requests by reason. shared/contracts/failures.py explains each reason.",
    ),
    Panel(
        title="TTFT",
        unit="s",
        queries=quantiles(names.FLEET_TTFT, "mode"),
        meaning="Time from request to first token. Good: below your target. Dots link to the traces of requests.",
        warn=TTFT_WARN_S,
        bad=TTFT_BAD_S,
        traces=SLOW_TTFT,
    ),
    Panel(
        title="ITL",
        unit="s",
        queries=quantiles(names.FLEET_ITL, "mode"),
        meaning="Mean time between tokens after the first, per request. Good: below 50 ms, faster than people read.",
        warn=ITL_WARN_S,
        bad=ITL_BAD_S,
        traces=ALL,
    ),
    Panel(
        title="E2E",
        unit="s",
        queries=quantiles(names.FLEET_E2E, "mode"),
        meaning="Time from request to last byte. It grows with the length of the completion, so there is no threshold.",
        traces=SLOW_REQUEST,
    ),
    Panel(
        title="TTFT by decode worker",
        unit="s",
        queries=quantiles(names.WORKER_TTFT, "worker_id"),
        meaning="Requests that this worker decoded. If one worker is slower than others, check its KV reads and queue.",
        warn=TTFT_WARN_S,
        bad=TTFT_BAD_S,
        traces=SLOW_TTFT,
    ),
    Panel(
        title="ITL by decode worker",
        unit="s",
        queries=quantiles(names.WORKER_ITL, "worker_id"),
        meaning="If one worker is slower than others, its batch is larger or it computes prompts in the same steps.",
        warn=ITL_WARN_S,
        bad=ITL_BAD_S,
        traces=ALL,
    ),
    Panel(
        title="E2E by decode worker",
        unit="s",
        queries=quantiles(names.WORKER_E2E, "worker_id"),
        meaning="Time from request to last byte of the requests that this worker decoded.",
        traces=SLOW_REQUEST,
    ),
    Panel(
        title="Goodput",
        unit="percentunit",
        queries={
            "{{instance}}": share(
                rate(names.ROUTER_GOALS, "instance", MET), rate(names.ROUTER_GOALS, "instance", TARGETED)
            )
        },
        meaning="Fraction of requests with targets (ROUTER_SLOS or their own) that met them. Good: above 95%.",
    ),
    graph(
        "Requests/s by target outcome",
        "reqps",
        {"{{goal}}": rate(names.ROUTER_GOALS, "goal")},
        "met: goodput. ttft_missed: too little prefill capacity or a long queue. itl_missed: too large decode batches.",
    ),
    Panel(
        title="TPOT",
        unit="s",
        queries=quantiles(names.ROUTER_TPOT, "mode"),
        meaning="Mean time between tokens after the first, per request, measured by the router. Good: below 50 ms.",
        warn=ITL_WARN_S,
        bad=ITL_BAD_S,
        traces=ALL,
    ),
    graph(
        "Requests in flight",
        "short",
        {"{{instance}}": gauge(names.ROUTER_IN_FLIGHT, "instance")},
        "Requests in progress, queued ones included. Good: similar for all routers behind a load balancer.",
    ),
    graph(
        "Tokens/s of finished requests",
        "short",
        {"{{kind}}": rate(names.FLEET_REQUEST_TOKENS, "kind")},
        "Prompt tokens (cached or not) and completion tokens.",
    ),
    graph(
        "Requests/s by decode worker",
        "reqps",
        {WORKER + " {{mode}}": rate(names.WORKER_REQUESTS, "worker_id, role, mode")},
        "Requests by the worker that decoded them. Good: similar for similar workers.",
    ),
    graph(
        "Retries/s and resumed streams/s",
        "short",
        {
            "{{reason}}": rate(names.ROUTER_RETRIES, "reason"),
            "{{reason}}, resumed": rate(names.ROUTER_RESUMES, "reason"),
        },
        "Failures that clients do not see. Good: empty. Otherwise see the reason.",
    ),
    graph(
        "Gap in resumed streams",
        "s",
        quantiles(names.ROUTER_RESUME, "instance"),
        "Time from the last data before the interruption to the first data after it. Empty without interruptions.",
    ),
    graph(
        "Traces/s by reason for keeping them",
        "short",
        {"{{why}}": rate(names.ROUTER_TRACES, "why")},
        "slow, failed and resumed requests are always traced; of the others a share. 0 without BATON_OTLP_ENDPOINT.",
    ),
    graph(
        "Refused requests/s by reason",
        "reqps",
        {"{{instance}} {{reason}}": rate(names.ROUTER_REFUSALS, "instance, reason")},
        "Requests that a router did not serve. overloaded: the demand exceeds the fleet's capacity.",
    ),
)


# Tenants.

TENANT = "{{tenant}}"
BY_TENANT = "tenant"
KEY = "{{tenant}}/{{key}}"
ENDED = rate(names.ROUTER_TENANT_REQUESTS, BY_TENANT)
REFUSED = 'outcome=~"overloaded|over_share"'
TOKENS = rate(names.ROUTER_TENANT_TOKENS, BY_TENANT)
ALL_TOKENS = f"sum (rate({names.ROUTER_TENANT_TOKENS.name}[{WINDOW}]))"
"""Of all tenants, independent of the page's variable."""

TENANTS = (
    graph(
        "Requests/s",
        "reqps",
        {TENANT: ENDED},
        "By tenant. (none): requests without a tenant. (others): all tenants after the first 32.",
    ),
    graph(
        "Requests/s by outcome",
        "reqps",
        {TENANT + " {{outcome}}": rate(names.ROUTER_TENANT_REQUESTS, "tenant, outcome")},
        "ok, or the reason of the failure.",
    ),
    Panel(
        title="Failed requests",
        unit="percentunit",
        queries={TENANT: failing(names.ROUTER_TENANT_REQUESTS, BY_TENANT, 'outcome!="ok"')},
        meaning="Fraction of the tenant's requests that failed. If one tenant alone is affected, check its requests.",
        warn=0.05,
    ),
    graph(
        "Tokens/s by kind",
        "short",
        {TENANT + " {{kind}}": rate(names.ROUTER_TENANT_TOKENS, "tenant, kind")},
        "Prompt tokens computed for the tenant (cached tokens are not counted), and tokens generated.",
    ),
    graph(
        "Share of all tokens",
        "percentunit",
        {TENANT: f"{TOKENS} / on () group_left () ({ALL_TOKENS} > 0)"},
        "Each tenant's share of all tokens. Under overload, fair sharing makes it equal to the tenant's weight.",
    ),
    graph(
        "Tokens in 1 h",
        "short",
        {TENANT + " {{kind}}": increase(names.ROUTER_TENANT_TOKENS, "tenant, kind")},
        "Prompt tokens computed and tokens generated.",
    ),
    graph("Requests in 1 h", "short", {TENANT: increase(names.ROUTER_TENANT_REQUESTS, BY_TENANT)}, "With any outcome."),
    graph(
        "Requests/s refused in the queue",
        "reqps",
        {TENANT + " {{outcome}}": rate(names.ROUTER_TENANT_REQUESTS, "tenant, outcome", REFUSED)},
        "over_share (429): the tenant exceeds its share of the queue. overloaded (503): demand exceeds capacity.",
    ),
    graph(
        "Requests waiting",
        "short",
        {"{{instance}}": gauge(names.ROUTER_QUEUE, "instance")},
        "Queued requests of all tenants, by router.",
    ),
    graph(
        "Tokens this month by key and kind",
        "short",
        {f"{KEY} {{{{kind}}}}": from_any(names.USAGE_TOKENS, "tenant, key, kind")},
        "From the usage ledger, since the first of the month in UTC: the 50 keys and models with the most tokens. "
        "Cached tokens are prompt tokens, too. `baton usage` has all keys and other months.",
    ),
    graph(
        "Engine time this month by model",
        "s",
        {"{{model}}": from_any(names.USAGE_ENGINE_SECONDS, "model")},
        "From the usage ledger: what the engines' learned step times give for the tokens, an estimate.",
    ),
    graph(
        "Requests this month by key",
        "short",
        {KEY: from_any(names.USAGE_REQUESTS, "tenant, key")},
        "From the usage ledger, failed ones included.",
    ),
    Panel(
        title="Budget used",
        unit="percentunit",
        queries={KEY: from_any(names.USAGE_BUDGET, "tenant, key")},
        meaning="Share of `monthly_tokens` of each API key that has a budget. From 100% on its requests get 429.",
        warn=0.8,
        bad=1.0,
    ),
)


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
