"""Fair shares among tenants, by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024).

Each tenant has a counter of the service it was given, by its weight. Of those that wait, the one with the smallest
counter is next. Who begins to wait is lifted to the smallest counter among those that wait already, or to that of the
last who waited: time that was not used is no credit. Whoever has waiting requests all the while gets its share,
whatever others send; and what nobody else wants, anyone may have.

Service is what had to be computed: prompt tokens that were cached or fetched cost nobody anything. The length of a
completion is not known when it begins: what the tenant's completions came to lately is charged then, and the rest is
settled at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""A completion's tokens are made one by one: they take more of an engine than as many prompt tokens."""
REQUEST_COST_MIN = 1.0
"""Of a request, however much of it is cached: something has to be counted."""
TOKENS_OUT_AT_FIRST = 256.0
"""Expected of a tenant's completion before one has ended."""
TOKENS_OUT_LEARNED = 0.1
"""How much the newest completion says about the next one."""
TENANTS_MAX = 4096
"""Tenants that are remembered while they wait for nothing; those longest away are forgotten beyond that."""
WEIGHT = 1.0
"""Of a tenant that the operator says nothing about."""


def cost_of(computed_tokens: int, tokens_out: float) -> float:
    """What a request costs its tenant."""
    return max(REQUEST_COST_MIN, PROMPT_TOKEN_COST * computed_tokens + OUTPUT_TOKEN_COST * tokens_out)


class Tenant:
    """One tenant's counter."""

    __slots__ = ("served", "tokens_out", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.served = 0.0
        """Cost of what it was given, by its weight."""
        self.waiting = 0
        """Requests."""
        self.tokens_out = TOKENS_OUT_AT_FIRST
        """Of its completions, lately."""


class FairShare:
    """The counters of all tenants that compete for the same thing."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._known: dict[str, Tenant] = {}
        """Who left last stands last."""
        self._waiting: dict[str, Tenant] = {}
        self._last: Tenant | None = None
        """Who was the last to wait for nothing any more."""

    def waiting(self) -> Iterable[str]:
        """Tenants that wait for something."""
        return self._waiting.keys()

    def served(self, tenant: str) -> float:
        """The tenant's counter; who has the smallest is next."""
        known = self._known.get(tenant)
        return known.served if known is not None else self._floor()

    def weight(self, tenant: str) -> float:
        """A tenant of weight 2 may have twice as much as one of weight 1."""
        return self._weights.get(tenant, WEIGHT)

    def weight_waiting(self) -> float:
        """Of all that wait, together."""
        return sum(tenant.weight for tenant in self._waiting.values())

    def expected_tokens_out(self, tenant: str, limit: int) -> float:
        """How long a completion of this tenant will be; ``limit`` is what the client set, 0 for none."""
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
        """One of its requests waits no more; it was charged before, if it is served."""
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
        """The tenant is given service that costs ``cost``; less than 0 to give back what was charged too much."""
        tenant = self._known.get(name)
        if tenant is not None:
            tenant.served += cost / tenant.weight

    def completed(self, name: str, tokens_out: int) -> None:
        """One of its completions came to so many tokens."""
        tenant = self._known.get(name)
        if tenant is not None:
            tenant.tokens_out += TOKENS_OUT_LEARNED * (tokens_out - tenant.tokens_out)

    def _floor(self) -> float:
        """What a tenant that begins to wait is lifted to."""
        if self._waiting:
            return min([tenant.served for tenant in self._waiting.values()])
        return self._last.served if self._last is not None else 0.0
