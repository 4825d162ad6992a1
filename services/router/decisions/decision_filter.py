"""Which decisions to list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from services.router.decisions.decision import Decision

UNKNOWN = -1.0


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
            (self.tenant is None or decision.request.tenant == self.tenant)
            and (not self.request_id or decision.request_id == self.request_id)
            and (not self.worker_id or self.worker_id in decision.workers)
            and (not self.outcome or decision.outcome == self.outcome)
            and decision.ttft_s >= self.ttft_s_min
            and (not self.missed or decision.missed_target)
        )
