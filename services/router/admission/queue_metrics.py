"""What the router counts of its admission queue, and of each tenant's requests."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from shared.telemetry import names
from shared.telemetry.prometheus import counter, gauge, histogram

TENANTS_NAMED_MAX: Final = 32
"""Number of tenants with series of their own, first come; all others share one."""
NO_TENANT: Final = "(none)"
"""The label of requests without a tenant; no tenant's name has parentheses."""
OTHER_TENANTS: Final = "(others)"
OK: Final = "ok"


class QueueMetrics:
    """The admission queue, and what each tenant has used."""

    def __init__(self, registry: CollectorRegistry, queue_max: int) -> None:
        gauge(names.ROUTER_QUEUE_MAX, registry).set(queue_max)
        self.queue = gauge(names.ROUTER_QUEUE, registry)
        self._waits = histogram(names.ROUTER_ADMISSION, registry).labels()
        self._requests = counter(names.ROUTER_TENANT_REQUESTS, registry)
        self._tokens = counter(names.ROUTER_TENANT_TOKENS, registry)
        self._named: set[str] = set()

    def waited(self, wait_s: float) -> None:
        self._waits.observe(wait_s)

    def ended(self, tenant: str, reason: str, computed_tokens: int, tokens_out: int) -> None:
        """A tenant's request has ended; ``reason`` is empty when it ended well."""
        label = self._label(tenant)
        self._requests.labels(label, reason or OK).value += 1
        self._tokens.labels(label, "computed").value += computed_tokens
        self._tokens.labels(label, "completion").value += tokens_out

    def _label(self, tenant: str) -> str:
        if tenant in self._named:
            return tenant
        if not tenant:
            return NO_TENANT
        if len(self._named) >= TENANTS_NAMED_MAX:
            return OTHER_TENANTS
        self._named.add(tenant)
        return tenant
