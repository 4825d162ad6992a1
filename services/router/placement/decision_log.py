"""The newest decisions of this router, bounded in number and memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

import msgspec

from services.router.placement.decision import UNKNOWN, Decision
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.decisions import DecisionRecord
from shared.contracts.ids import DecisionId, RequestId, RouterId

LISTED_MAX = 100
"""Decisions in one list."""


class DecisionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which decisions to list; empty and negative values match all."""

    tenant: str | None = None
    """None matches all tenants; the empty tenant is one of them."""
    request_id: str = ""
    worker_id: str = ""
    outcome: str = ""
    ttft_s_min: float = UNKNOWN
    missed: bool = False
    """Only those that missed a target."""
    limit: int = 20

    def matches(self, decision: Decision) -> bool:
        return (
            (self.tenant is None or decision.tenant == self.tenant)
            and (not self.request_id or decision.request_id == self.request_id)
            and (not self.worker_id or self.worker_id in decision.workers)
            and (not self.outcome or decision.outcome == self.outcome)
            and decision.ttft_s >= self.ttft_s_min
            and (not self.missed or decision.missed_target)
        )


class DecisionLog:
    """At most ``count_max`` decisions of about ``bytes_max`` bytes together; the oldest are dropped first."""

    def __init__(self, router_id: RouterId, random_hex: Callable[[], str], *, count_max: int, bytes_max: int) -> None:
        """``random_hex`` returns 128 random bits as 32 digits."""
        self._router_id = router_id
        self._random_hex = random_hex
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._decisions: deque[Decision] = deque()
        self._by_id: dict[str, Decision] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def add(  # noqa: PLR0913  # the record's fields
        self,
        request_id: RequestId,
        request: PlacementRequest,
        result: Placement | Rejection,
        *,
        at_unix_s: float,
        attempt: int = 1,
        exact: bool = False,
        why_inexact: str = "",
        earlier: Decision | None = None,
    ) -> Decision:
        """A request was placed or rejected, after an ``earlier`` attempt that failed. The caller ends the decision."""
        decision = Decision(
            decision_id=DecisionId(f"{self._router_id}-d{self._random_hex()}"),
            request_id=request_id,
            model=request.model,
            tenant=request.tenant,
            priority=request.priority,
            targets=request.targets,
            prompt_tokens=request.prompt_tokens,
            exact=exact,
            why_inexact=why_inexact,
            at_unix_s=at_unix_s,
            attempt=attempt,
            earlier=earlier.decision_id if earlier is not None else DecisionId(""),
            result=result,
        )
        self._decisions.append(decision)
        self._by_id[decision.decision_id] = decision
        self.bytes_held += decision.bytes
        self._drop_oldest()
        return decision

    def _drop_oldest(self) -> None:
        """Down to the limits."""
        while self.bytes_held > self._bytes_max or len(self._decisions) > self._count_max:
            oldest = self._decisions.popleft()
            del self._by_id[oldest.decision_id]
            self.bytes_held -= oldest.bytes

    def find(self, decision_id: str, tenant: str | None = None) -> DecisionRecord | None:
        """None: this router never made it, has dropped it, or it is another tenant's."""
        decision = self._by_id.get(decision_id)
        if decision is None or tenant not in (None, decision.tenant):
            return None
        return decision.record(self._router_id)

    def newest_first(self) -> list[Decision]:
        """All decisions at this moment."""
        return list(reversed(self._decisions))

    def listed(
        self, wanted: DecisionFilter, among: Iterable[Decision] | None = None, *, with_candidates: bool = False
    ) -> list[DecisionRecord]:
        """Those that match, newest first; ``among`` is a part of ``newest_first``."""
        limit = max(0, min(wanted.limit, LISTED_MAX))
        found = filter(wanted.matches, self.newest_first() if among is None else among)
        return [one.record(self._router_id, with_candidates=with_candidates) for one in islice(found, limit)]
