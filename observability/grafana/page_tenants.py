"""Usage and waiting times by tenant."""

from __future__ import annotations

from observability.grafana.panels import WINDOW, Panel, failing, gauge, graph, increase, rate
from shared.telemetry import names

TENANT = "{{tenant}}"
BY_TENANT = "tenant"
ENDED = rate(names.ROUTER_TENANT_REQUESTS, BY_TENANT)
REFUSED = 'outcome=~"overloaded|over_share"'
TOKENS = rate(names.ROUTER_TENANT_TOKENS, BY_TENANT)
ALL_TOKENS = f"sum (rate({names.ROUTER_TENANT_TOKENS.name}[{WINDOW}]))"
"""Of all tenants, whichever are chosen."""

TENANTS = (
    graph(
        "Requests/s",
        "reqps",
        {TENANT: ENDED},
        "By tenant; (none) are requests that name none, (others) all beyond the first 32 tenants.",
    ),
    graph(
        "How requests end",
        "reqps",
        {TENANT + " {{outcome}}": rate(names.ROUTER_TENANT_REQUESTS, "tenant, outcome")},
        "ok, or the reason that ended them.",
    ),
    Panel(
        title="Not served well",
        unit="percentunit",
        queries={TENANT: failing(names.ROUTER_TENANT_REQUESTS, BY_TENANT, 'outcome!="ok"')},
        meaning="The part of a tenant's requests that did not end well. One tenant alone: look at its requests.",
        warn=0.05,
    ),
    graph(
        "Tokens/s by kind",
        "short",
        {TENANT + " {{kind}}": rate(names.ROUTER_TENANT_TOKENS, "tenant, kind")},
        "Prompt tokens that were computed for it (cached ones cost nothing), and tokens generated.",
    ),
    graph(
        "Share of all tokens",
        "percentunit",
        {TENANT: f"{TOKENS} / on () group_left () ({ALL_TOKENS} > 0)"},
        "What each has of the work. When all want more than there is, fair shares bring these to the tenants' weights.",
    ),
    graph(
        "Tokens in an hour",
        "short",
        {TENANT + " {{kind}}": increase(names.ROUTER_TENANT_TOKENS, "tenant, kind")},
        "Computed and generated.",
    ),
    graph(
        "Requests in an hour",
        "short",
        {TENANT: increase(names.ROUTER_TENANT_REQUESTS, BY_TENANT)},
        "However they ended.",
    ),
    graph(
        "Refused in the queue",
        "reqps",
        {TENANT + " {{outcome}}": rate(names.ROUTER_TENANT_REQUESTS, "tenant, outcome", REFUSED)},
        "over_share (429): it waits with more than its share. overloaded (503): all want more than there is.",
    ),
    graph(
        "Requests waiting",
        "short",
        {"{{instance}}": gauge(names.ROUTER_QUEUE, "instance")},
        "Of all tenants, by router.",
    ),
)
