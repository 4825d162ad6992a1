"""Fair shares among tenants, by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024).

Each tenant has a counter of the service that it received, divided by its weight. Of the tenants with waiting requests,
the one with the smallest counter is next. A tenant that begins to wait is lifted to the smallest counter among those
that wait already, or to that of the last one that waited: an idle tenant saves no credit. A tenant that always has
waiting requests gets its share, whatever others send; capacity that no other tenant needs is free for all.

Only computed tokens count as service: cached and fetched prompt tokens are free. The length of a completion is not
known when it begins: the mean of the tenant's latest completions is charged then, and the difference at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PROMPT_TOKEN_COST: Final = 1.0
OUTPUT_TOKEN_COST: Final = 2.0
"""Completion tokens are generated one by one, and take more engine time than as many prompt tokens."""
REQUEST_COST_MIN: Final = 1.0
"""Least cost of a request, which one with a fully cached prompt has."""
TOKENS_OUT_AT_FIRST: Final = 256.0
"""Assumed length of a tenant's completions before one has ended."""
TOKENS_OUT_LEARNED: Final = 0.1
"""Weight of the newest completion in the mean length."""
TENANTS_MAX: Final = 4096
"""Tenants whose counters are kept while none of their requests waits; beyond that the longest idle are dropped."""
WEIGHT: Final = 1.0
"""Default weight of a tenant."""


def cost_of(computed_tokens: int, tokens_out: float) -> float:
    """The service that a request counts for."""
    return max(REQUEST_COST_MIN, PROMPT_TOKEN_COST * computed_tokens + OUTPUT_TOKEN_COST * tokens_out)


class Tenant:
    """One tenant's counter."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.served = 0.0
        """Cost of the service that it received, divided by its weight."""
        self.waiting = 0
        """Number of its requests that wait."""
        self.tokens_out = TOKENS_OUT_AT_FIRST
        """Mean length of its completions, lately."""


class FairShare:
    """The counters of all tenants that compete in one queue."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._known: dict[str, Tenant] = {}
        """Tenants in the order in which they last stopped waiting."""
        self._waiting: dict[str, Tenant] = {}
        self._last: Tenant | None = None
        """The tenant that stopped waiting last."""

    def served(self, tenant: str) -> float:
        """The tenant's counter; the smallest is next."""
        known = self._known.get(tenant)
        return known.served if known is not None else self._floor()

    def weight(self, tenant: str) -> float:
        """A tenant of weight 2 may have twice as much as one of weight 1."""
        return self._weights.get(tenant, WEIGHT)

    def weight_waiting(self) -> float:
        """Sum over all tenants with waiting requests."""
        return sum(tenant.weight for tenant in self._waiting.values())

    def expected_tokens_out(self, tenant: str, limit: int) -> float:
        """Expected length of the tenant's next completion; ``limit``: the client's, 0 for none."""
        known = self._known.get(tenant)
        expected = known.tokens_out if known is not None else TOKENS_OUT_AT_FIRST
        return min(expected, limit) if limit else expected

    def enter(self, name: str) -> None:
        """One more request of this tenant waits."""
        tenant = self._known.get(name)
        if tenant is None:
            tenant = self._known[name] = Tenant(self.weight(name))
        if not tenant.waiting:
            tenant.served = max(tenant.served, self._floor())
            self._waiting[name] = tenant
        tenant.waiting += 1

    def leave(self, name: str) -> None:
        """One of its requests waits no more; if it is served, it was charged before."""
        tenant = self._known[name]
        tenant.waiting -= 1
        if tenant.waiting:
            return
        del self._waiting[name]
        self._last = tenant
        del self._known[name]
        self._known[name] = tenant
        if len(self._known) - len(self._waiting) > TENANTS_MAX:
            del self._known[next(known for known, tenant in self._known.items() if not tenant.waiting)]

    def charge(self, name: str, cost: float) -> None:
        """Add ``cost`` to the tenant's counter; negative to give back what was charged too much."""
        tenant = self._known.get(name)
        if tenant is not None:
            tenant.served += cost / tenant.weight

    def completed(self, name: str, tokens_out: float) -> None:
        """One of its completions ended with that many tokens; a mean for several that end together."""
        tenant = self._known.get(name)
        if tenant is not None:
            tenant.tokens_out += TOKENS_OUT_LEARNED * (tokens_out - tenant.tokens_out)

    def _floor(self) -> float:
        """The counter that a tenant that begins to wait is lifted to."""
        if self._waiting:
            return min([tenant.served for tenant in self._waiting.values()])
        return self._last.served if self._last is not None else 0.0
