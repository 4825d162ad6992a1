"""The newest decisions of this router, bounded in number and memory."""

from __future__ import annotations

from collections import deque

import msgspec

from services.router.placement.decision import UNKNOWN, Decision
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.decisions import DecisionRecord
from shared.contracts.ids import DecisionId, RequestId, RouterId, is_subject_token

LISTED_MAX = 100
"""Decisions in one list."""
SEPARATOR = "-d"
"""Between the router and the number in the id of a decision."""


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

    def __init__(self, router_id: RouterId, *, count_max: int, bytes_max: int) -> None:
        self._router_id = router_id
        self._prefix = f"{router_id}{SEPARATOR}"
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._decisions: deque[Decision] = deque()
        self._made = 0
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def add(
        self,
        request_id: RequestId,
        request: PlacementRequest,
        result: Placement | Rejection,
        *,
        at_unix_s: float,
        attempt: int = 1,
        exact: bool = False,
        earlier: Decision | None = None,
    ) -> Decision:
        """A request was placed or rejected, after an ``earlier`` attempt that failed. The caller ends the decision."""
        self._made += 1
        decision = Decision(
            decision_id=DecisionId(f"{self._prefix}{self._made}"),
            request_id=request_id,
            model=request.model,
            tenant=request.tenant,
            priority=request.priority,
            targets=request.targets,
            prompt_tokens=request.prompt_tokens,
            exact=exact,
            at_unix_s=at_unix_s,
            attempt=attempt,
            earlier=earlier.decision_id if earlier is not None else DecisionId(""),
            result=result,
        )
        self._decisions.append(decision)
        self.bytes_held += decision.bytes
        while self.bytes_held > self._bytes_max or len(self._decisions) > self._count_max:
            self.bytes_held -= self._decisions.popleft().bytes
        return decision

    def find(self, decision_id: str) -> DecisionRecord | None:
        """None: this router never made it, or has dropped it."""
        number = decision_id.removeprefix(self._prefix) if decision_id.startswith(self._prefix) else ""
        if not (number.isascii() and number.isdigit() and len(number) <= len(str(self._made))):
            return None
        place = int(number) - 1 - (self._made - len(self._decisions))
        if not 0 <= place < len(self._decisions):
            return None
        decision = self._decisions[place]
        return decision.record(self._router_id) if decision.decision_id == decision_id else None

    def newest(self) -> DecisionRecord | None:
        return self._decisions[-1].record(self._router_id) if self._decisions else None

    def listed(self, wanted: DecisionFilter) -> list[DecisionRecord]:
        """Newest first, without their candidates."""
        limit = max(0, min(wanted.limit, LISTED_MAX))
        found: list[DecisionRecord] = []
        for decision in reversed(self._decisions):
            if len(found) >= limit:
                break
            if wanted.matches(decision):
                found.append(decision.record(self._router_id, with_candidates=False))
        return found

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """The request's attempts, the last one first."""
        attempts = [one for one in reversed(self._decisions) if one.request_id == request_id]
        return [one.record(self._router_id) for one in attempts[:LISTED_MAX]]


def router_of(decision_id: str) -> RouterId:
    """The router that made the decision; empty when ``decision_id`` is not the id of a decision."""
    router_id, separator, number = decision_id.rpartition(SEPARATOR)
    is_one = separator and number.isascii() and number.isdigit() and is_subject_token(router_id)
    return RouterId(router_id if is_one else "")
