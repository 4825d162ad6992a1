"""Who sends how much to whom, as the console draws it: flows between router and workers, tenants, the last minute."""

from __future__ import annotations

from collections import Counter, deque

from services.collector.console.requests import missed_target
from services.collector.console.views import FlowLine, TenantRow
from services.collector.metrics.windows import OTHER, Rate
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished

ROUTER = "router"
REQUESTS, KV = "requests", "kv"
FLOWS_MAX = 1024
TENANTS_MAX = 64
MINUTE_S = 60
TENANT_FORGET_S = 600.0
"""A tenant that asked for nothing so long is no longer shown."""
FAILURES_MAX = 256
"""Of the last minute's failures, so many say what was wrong most often."""
SERVER_ERROR = 500
REFUSED = frozenset({Reason.OVERLOADED.value, Reason.OVER_SHARE.value})
"""The system was too busy; nothing was broken."""
NOT_OURS = frozenset({Reason.CLIENT_SLOW.value, Reason.CANCELLED.value})


class Flow:
    """One line of the picture."""

    __slots__ = ("bytes", "count", "tokens")

    def __init__(self, now: float) -> None:
        self.count, self.bytes, self.tokens = Rate(now), Rate(now), Rate(now)

    def add(self, tokens: int, size_bytes: int, now: float) -> None:
        """One more request, or one more piece of KV."""
        self.count.add(1, now)
        self.tokens.add(max(0, tokens), now)
        self.bytes.add(max(0, size_bytes), now)


class Flows:
    """Where requests and KV go just now. At most ``FLOWS_MAX``."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str, str], Flow] = {}
        """The one on which nothing went for longest comes first."""

    def add(self, told: RequestFinished, now: float) -> None:
        """One request has ended."""
        first = told.prefill_worker or told.decode_worker
        if first:
            self._add((ROUTER, first, REQUESTS), told.prompt_tokens, 0, now)
        for move in told.kv_moves:
            self._add((move.source_id, move.reader_id, KV), move.tokens, move.bytes, now)

    def lines(self, now: float) -> list[FlowLine]:
        """Those on which something went lately."""
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
        flow = self._flows.pop(key, None)
        if flow is None:
            if len(self._flows) >= FLOWS_MAX:
                del self._flows[next(iter(self._flows))]
            flow = Flow(now)
        self._flows[key] = flow
        flow.add(tokens, size_bytes, now)


class TenantTraffic:
    """One tenant's last minute."""

    __slots__ = ("cached", "last", "prompt", "refused", "requests", "tokens")

    def __init__(self, now: float) -> None:
        self.requests, self.tokens, self.refused = (Rate(now, MINUTE_S) for _ in range(3))
        self.prompt, self.cached = (Rate(now, MINUTE_S) for _ in range(2))
        """Prompt tokens of which it is known how many were cached, and those that were."""
        self.last = now

    def add(self, told: RequestFinished, now: float) -> None:
        """One more request."""
        self.last = now
        self.requests.add(1, now)
        self.tokens.add(max(0, told.prompt_tokens) + max(0, told.completion_tokens), now)
        if told.reason in REFUSED:
            self.refused.add(1, now)
        if told.prompt_tokens >= 0 and told.cached_tokens >= 0:
            self.prompt.add(told.prompt_tokens, now)
            self.cached.add(told.cached_tokens, now)


class Tenants:
    """At most ``TENANTS_MAX``; all others are one."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantTraffic] = {}

    def add(self, told: RequestFinished, now: float) -> None:
        """One request has ended."""
        name = told.tenant
        if name not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            name = OTHER
        if name not in self._tenants:
            self._tenants[name] = TenantTraffic(now)
        self._tenants[name].add(told, now)

    def rows(self, now: float) -> list[TenantRow]:
        """By name."""
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


class LastMinute:
    """How the requests of the last minute fared, all together."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._all, self._failed, self._refused, self._late = (Rate(now, MINUTE_S) for _ in range(4))
        self._reasons: deque[tuple[float, str]] = deque(maxlen=FAILURES_MAX)

    def add(self, told: RequestFinished, now: float) -> None:
        """One request has ended."""
        self._all.add(1, now)
        if told.reason in REFUSED:
            self._refused.add(1, now)
        elif told.status >= SERVER_ERROR or (told.reason and told.reason not in NOT_OURS and told.status < 400):
            self._failed.add(1, now)
            self._reasons.append((now, told.reason or str(told.status)))
        if missed_target(told):
            self._late.add(1, now)

    def requests(self, now: float) -> int:
        """How many there were; likewise the other numbers."""
        return self._count(self._all, now)

    def failed(self, now: float) -> int:
        """Broken, not refused."""
        return self._count(self._failed, now)

    def refused(self, now: float) -> int:
        """Because the system was too busy."""
        return self._count(self._refused, now)

    def late(self, now: float) -> int:
        """Slower than their targets."""
        return self._count(self._late, now)

    def per_s(self, now: float) -> float:
        """Requests per second."""
        return self._all.per_second(now)

    def most_frequent_reason(self, now: float) -> str:
        """Of what failed."""
        reasons = Counter(reason for at, reason in self._reasons if now - at < MINUTE_S)
        return reasons.most_common(1)[0][0] if reasons else ""

    def _count(self, rate: Rate, now: float) -> int:
        return round(rate.per_second(now) * min(float(MINUTE_S), max(1.0, now - self._begun)))
