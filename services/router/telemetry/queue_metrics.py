"""What operators see of the waiting room and of tenants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.telemetry import names
from shared.telemetry.prometheus import counter, gauge, histogram

TENANTS_NAMED_MAX = 32
"""Tenants with numbers of their own, the first to come; all others have theirs in common."""
NO_TENANT, OTHER_TENANTS = "(none)", "(others)"
"""No tenant can have such a name."""
OK = "ok"


class QueueMetrics:
    """Written by ``AdmissionQueue``."""

    def __init__(self, registry: CollectorRegistry, queue_max: int) -> None:
        gauge(names.ROUTER_QUEUE_MAX, registry).set(queue_max)
        self.queue = gauge(names.ROUTER_QUEUE, registry)
        self._waits = histogram(names.ROUTER_ADMISSION, registry)
        self._requests = counter(names.ROUTER_TENANT_REQUESTS, registry)
        self._tokens = counter(names.ROUTER_TENANT_TOKENS, registry)
        self._named: set[str] = set()

    def waited(self, wait_s: float) -> None:
        """Somebody had to wait, and the wait is over."""
        self._waits.observe(wait_s)

    def ended(self, tenant: str, reason: str, computed_tokens: int, tokens_out: int) -> None:
        """A tenant's request is over; ``reason`` is empty when all went well."""
        label = self._label(tenant)
        self._requests.labels(label, reason or OK).inc()
        self._tokens.labels(label, "computed").inc(computed_tokens)
        self._tokens.labels(label, "completion").inc(tokens_out)

    def _label(self, tenant: str) -> str:
        if tenant in self._named:
            return tenant
        if not tenant:
            return NO_TENANT
        if len(self._named) >= TENANTS_NAMED_MAX:
            return OTHER_TENANTS
        self._named.add(tenant)
        return tenant
