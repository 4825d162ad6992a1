"""A placement in the words of the log of decisions."""

from __future__ import annotations

from services.router.placement.decision_log import UNKNOWN, Asked, Choice
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.slo import NONE
from shared.contracts.ids import RequestId


def choice_of(placement: Placement | Rejection) -> Choice:
    """What was decided."""
    if isinstance(placement, Rejection):
        return Choice(mode="", reason=placement.message)
    prefill = placement.prefill
    return Choice(
        mode=placement.mode.value,
        reason=placement.why,
        prefill_worker=prefill.record.worker_id if prefill is not None else "",
        decode_worker=placement.decode.record.worker_id,
        sources=placement.sources,
        predicted=placement.predicted,
        predicted_itl_s=placement.predicted_itl_s,
        cached_tokens=placement.cached_tokens,
        considered=placement.considered,
    )


def asked_of(need: PlacementRequest, request_id: RequestId, at_unix_s: float, *, attempt: int, exact: bool) -> Asked:
    """What was asked for."""
    targets = need.targets
    return Asked(
        request_id=request_id,
        model=need.model,
        at_unix_s=at_unix_s,
        attempt=attempt,
        prompt_tokens=need.prompt_tokens,
        exact=exact,
        tenant=need.tenant,
        priority=need.priority,
        ttft_target_s=targets.ttft_s if targets.ttft_s != NONE else UNKNOWN,
        itl_target_s=targets.itl_s if targets.itl_s != NONE else UNKNOWN,
    )
