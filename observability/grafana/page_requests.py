"""What clients get: rate, errors and durations, for the whole and by worker."""

from __future__ import annotations

from observability.grafana.page_fleet import WORKER
from observability.grafana.panels import Panel, failing, gauge, graph, quantiles, rate, share
from shared.telemetry import names

LATER = '{ name = "first token" && duration > ${__value.raw}s }'
SLOWER = '{ resource.service.name = "baton-router" && name = "request" && duration > ${__value.raw}s }'
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
        "Good: 200. 4xx are clients' mistakes or limits, 499 clients who left, 5xx are ours.",
    ),
    Panel(
        title="Errors",
        unit="percentunit",
        queries={"{{model}}": failing(names.FLEET_REQUESTS, "model", ERRORS)},
        meaning="The part of requests that fail through no fault of their client. Good: 0.",
        warn=0.01,
        bad=0.05,
        traces=FAILED,
    ),
    graph(
        "Failures by reason",
        "reqps",
        {"{{reason}}": rate(names.FLEET_FAILURES, "reason")},
        "Why requests did not end well. Each reason is explained in shared/contracts/failures.py.",
    ),
    Panel(
        title="TTFT",
        unit="s",
        queries=quantiles(names.FLEET_TTFT, "mode"),
        meaning="From request to first token. Good: below your target. A dot is a request; it leads to its trace.",
        warn=TTFT_WARN_S,
        bad=TTFT_BAD_S,
        traces=LATER,
    ),
    Panel(
        title="ITL",
        unit="s",
        queries=quantiles(names.FLEET_ITL, "mode"),
        meaning="Mean time between tokens after the first, per request. Good: below 50 ms, faster than anybody reads.",
        warn=ITL_WARN_S,
        bad=ITL_BAD_S,
        traces=ALL,
    ),
    Panel(
        title="E2E",
        unit="s",
        queries=quantiles(names.FLEET_E2E, "mode"),
        meaning="From request to last byte. Grows with the length of answers: no threshold fits all.",
        traces=SLOWER,
    ),
    Panel(
        title="TTFT by decode worker",
        unit="s",
        queries=quantiles(names.WORKER_TTFT, "worker_id"),
        meaning="Of the requests that it generated. One worker above the others: look at its KV reads and its queue.",
        warn=TTFT_WARN_S,
        bad=TTFT_BAD_S,
        traces=LATER,
    ),
    Panel(
        title="ITL by decode worker",
        unit="s",
        queries=quantiles(names.WORKER_ITL, "worker_id"),
        meaning="One worker above the others: its batch is larger, or prompts are computed beside its decodes.",
        warn=ITL_WARN_S,
        bad=ITL_BAD_S,
        traces=ALL,
    ),
    Panel(
        title="E2E by decode worker",
        unit="s",
        queries=quantiles(names.WORKER_E2E, "worker_id"),
        meaning="From request to last byte, of the requests that it generated.",
        traces=SLOWER,
    ),
    Panel(
        title="Goodput, of requests with targets",
        unit="percentunit",
        queries={
            "{{instance}}": share(
                rate(names.ROUTER_GOALS, "instance", MET), rate(names.ROUTER_GOALS, "instance", TARGETED)
            )
        },
        meaning="The part that kept their targets (ROUTER_SLOS, or their own). Good: above 95%. Empty without targets.",
    ),
    graph(
        "Requests/s by what became of their targets",
        "reqps",
        {"{{goal}}": rate(names.ROUTER_GOALS, "goal")},
        "met is goodput. ttft_missed: prefill is short, or the queue long. itl_missed: too much is decoded together.",
    ),
    Panel(
        title="TPOT",
        unit="s",
        queries=quantiles(names.ROUTER_TPOT, "mode"),
        meaning="Mean time between tokens after the first, per request. Good: below 50 ms. ITL has the single pauses.",
        warn=ITL_WARN_S,
        bad=ITL_BAD_S,
        traces=ALL,
    ),
    graph(
        "Requests in flight",
        "short",
        {"{{instance}}": gauge(names.ROUTER_IN_FLIGHT, "instance")},
        "Being served now, waiting ones included. Good: alike among routers behind one load balancer.",
    ),
    graph(
        "Tokens/s of ended requests",
        "short",
        {"{{kind}}": rate(names.FLEET_REQUEST_TOKENS, "kind")},
        "Prompt tokens, cached or not, and completion tokens.",
    ),
    graph(
        "Requests/s by decode worker",
        "reqps",
        {WORKER + " {{mode}}": rate(names.WORKER_REQUESTS, "worker_id, role, mode")},
        "By the worker that generated them. Good: equal workers get equal shares.",
    ),
    graph(
        "Placed again, and resumed",
        "short",
        {
            "{{reason}}": rate(names.ROUTER_RETRIES, "reason"),
            "{{reason}}, resumed": rate(names.ROUTER_RESUMES, "reason"),
        },
        "Legs/s that failed and that no client noticed. Good: empty. Else the reason says what breaks.",
    ),
    graph(
        "Streams that broke off: time until they went on",
        "s",
        quantiles(names.ROUTER_RESUME, "instance"),
        "From the last data before to the next after. Empty where none broke off.",
    ),
    graph(
        "Traces/s by why they were kept",
        "short",
        {"{{why}}": rate(names.ROUTER_TRACES, "why")},
        "slow, failed and resumed requests are always traced, of others a share. Zero without BATON_OTLP_ENDPOINT.",
    ),
    graph(
        "Refused at the edge or in the queue",
        "reqps",
        {"{{instance}} {{reason}}": rate(names.ROUTER_REFUSALS, "instance, reason")},
        "Requests/s that a router did not serve, by reason. overloaded: more is wanted than the fleet can do.",
    ),
)
