"""Tenants dashboard: requests, tokens and refusals of each tenant."""

from __future__ import annotations

from observability.grafana.panels import WINDOW, Panel, failing, gauge, graph, increase, rate
from shared.telemetry import names

TENANT = "{{tenant}}"
BY_TENANT = "tenant"
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
    graph(
        "Requests in 1 h",
        "short",
        {TENANT: increase(names.ROUTER_TENANT_REQUESTS, BY_TENANT)},
        "With any outcome.",
    ),
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
)
