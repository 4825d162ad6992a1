"""Recent traffic for the console: flows between router and workers, tenants, the last minute's outcomes."""

from __future__ import annotations

from collections import Counter, deque

from services.collector.console.requests import missed_target
from services.collector.console.views import FlowLine, TenantRow
from services.collector.metrics.windows import OTHER, Rate
from shared.bounded import Bounded
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished

ROUTER = "router"
REQUESTS, KV = "requests", "kv"
FLOWS_MAX = 1024
TENANTS_MAX = 64
MINUTE_S = 60
TENANT_FORGET_S = 600.0
"""A tenant without requests for this long is no longer shown."""
FAILURES_MAX = 256
"""Failures of the last minute from which the most frequent reason is taken."""
SERVER_ERROR = 500
REFUSED = frozenset({Reason.OVERLOADED.value, Reason.OVER_SHARE.value})
"""Reasons that mean overload rather than a fault."""
NOT_OURS = frozenset({Reason.CLIENT_SLOW.value, Reason.CANCELLED.value})


class Flow:
    """The rates of one flow."""

    __slots__ = ("bytes", "count", "tokens")

    def __init__(self, now: float) -> None:
        self.count, self.bytes, self.tokens = Rate(now), Rate(now), Rate(now)

    def add(self, tokens: int, size_bytes: int, now: float) -> None:
        """Add one request or one KV transfer."""
        self.count.add(1, now)
        self.tokens.add(max(0, tokens), now)
        self.bytes.add(max(0, size_bytes), now)


class Flows:
    """Current flows of requests and KV, at most ``FLOWS_MAX``."""

    def __init__(self) -> None:
        self._flows = Bounded[tuple[str, str, str], Flow](FLOWS_MAX)
        """Flows in order of last use: the least recently used comes first."""

    def add(self, request: RequestFinished, now: float) -> None:
        first = request.prefill_worker or request.decode_worker
        if first:
            self._add((ROUTER, first, REQUESTS), request.prompt_tokens, 0, now)
        for move in request.kv_moves:
            self._add((move.source_id, move.reader_id, KV), move.tokens, move.bytes, now)

    def lines(self, now: float) -> list[FlowLine]:
        """Flows with recent traffic."""
        lines = []
        for key, flow in sorted(self._flows.items()):
            per_s = flow.count.per_second(now)
            if per_s <= 0:
                del self._flows[key]
                continue
            lines.append(
                FlowLine(
                    source=key[0],
                    target=key[1],
                    kind=key[2],
                    per_s=round(per_s, 2),
                    bytes_per_s=round(flow.bytes.per_second(now)),
                    tokens_per_s=round(flow.tokens.per_second(now), 1),
                )
            )
        return lines

    def _add(self, key: tuple[str, str, str], tokens: int, size_bytes: int, now: float) -> None:
        known = self._flows.pop(key, None)
        flow = self._flows[key] = known or Flow(now)
        flow.add(tokens, size_bytes, now)


class TenantTraffic:
    """One tenant's last minute."""

    __slots__ = ("cached", "last", "prompt", "refused", "requests", "tokens")

    def __init__(self, now: float) -> None:
        self.requests, self.tokens, self.refused = (Rate(now, MINUTE_S) for _ in range(3))
        self.prompt, self.cached = (Rate(now, MINUTE_S) for _ in range(2))
        """Prompt tokens of requests whose cached tokens are known, and those cached tokens."""
        self.last = now

    def add(self, request: RequestFinished, now: float) -> None:
        self.last = now
        self.requests.add(1, now)
        self.tokens.add(max(0, request.prompt_tokens) + max(0, request.completion_tokens), now)
        if request.reason in REFUSED:
            self.refused.add(1, now)
        if request.prompt_tokens >= 0 and request.cached_tokens >= 0:
            self.prompt.add(request.prompt_tokens, now)
            self.cached.add(request.cached_tokens, now)


class Tenants:
    """At most ``TENANTS_MAX`` tenants; the rest are counted together as ``other``."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantTraffic] = {}

    def add(self, request: RequestFinished, now: float) -> None:
        name = request.tenant
        if name not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            name = OTHER
        if name not in self._tenants:
            self._tenants[name] = TenantTraffic(now)
        self._tenants[name].add(request, now)

    def rows(self, now: float) -> list[TenantRow]:
        """One row for each tenant, sorted by name."""
        for name in [name for name, one in self._tenants.items() if now - one.last >= TENANT_FORGET_S]:
            del self._tenants[name]
        return [_tenant_row(name, self._tenants[name], now) for name in sorted(self._tenants)]


def _tenant_row(name: str, one: TenantTraffic, now: float) -> TenantRow:
    prompt = one.prompt.per_second(now)
    return TenantRow(
        tenant=name,
        requests_per_s=round(one.requests.per_second(now), 2),
        tokens_per_s=round(one.tokens.per_second(now), 1),
        refused_per_s=round(one.refused.per_second(now), 2),
        cached_ratio=round(min(1.0, one.cached.per_second(now) / prompt), 3) if prompt > 0 else None,
    )


def counts_as_failure(request: RequestFinished) -> bool:
    """Whether it failed, and not because of overload, a sleeping model, its client or itself."""
    if request.reason in REFUSED or request.reason == Reason.MODEL_ASLEEP:
        return False
    broken = request.reason and request.reason not in NOT_OURS and request.status < 400
    return bool(request.status >= SERVER_ERROR or broken)


class LastMinute:
    """Outcomes of the last minute's requests, all tenants together."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._all, self._failed, self._refused, self._late = (Rate(now, MINUTE_S) for _ in range(4))
        self._reasons: deque[tuple[float, str]] = deque(maxlen=FAILURES_MAX)

    def add(self, request: RequestFinished, now: float) -> None:
        self._all.add(1, now)
        if request.reason in REFUSED:
            self._refused.add(1, now)
        elif counts_as_failure(request):
            self._failed.add(1, now)
            self._reasons.append((now, request.reason or str(request.status)))
        if missed_target(request):
            self._late.add(1, now)

    def requests(self, now: float) -> int:
        """Requests of the last minute, like the other counts here."""
        return self._count(self._all, now)

    def failed(self, now: float) -> int:
        """Failed, not counting refusals because of overload."""
        return self._count(self._failed, now)

    def refused(self, now: float) -> int:
        """Refused because of overload."""
        return self._count(self._refused, now)

    def late(self, now: float) -> int:
        """Requests that missed a target."""
        return self._count(self._late, now)

    def most_frequent_reason(self, now: float) -> str:
        """The most frequent failure reason; empty without failures."""
        reasons = Counter(reason for at, reason in self._reasons if now - at < MINUTE_S)
        return reasons.most_common(1)[0][0] if reasons else ""

    def _count(self, rate: Rate, now: float) -> int:
        return round(rate.per_second(now) * min(float(MINUTE_S), max(1.0, now - self._begun)))
