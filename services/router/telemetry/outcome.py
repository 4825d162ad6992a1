"""How a request ended: whether it met its targets, and whether its trace is worth keeping."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from shared.contracts.inference import RequestFinished

SERVER_ERROR: Final = 500
TOO_MANY: Final = 429


class Kept(StrEnum):
    """Why a trace is kept."""

    FAILED = "failed"
    RESUMED = "resumed"
    SLOW = "slow"
    SHARE = "share"
    """Nothing unusual: chosen as one of the sampled share."""


class TargetOutcome(StrEnum):
    """Whether a request met its targets."""

    MET = "met"
    TTFT_MISSED = "ttft_missed"
    ITL_MISSED = "itl_missed"
    FAILED = "failed"
    """No response, or an incomplete one: counted as missing every target."""
    NO_TARGET = "no_target"


def failed(finished: RequestFinished) -> bool:
    """Whether the request failed for a reason other than its client leaving or asking for something invalid."""
    return finished.status >= SERVER_ERROR or finished.status == TOO_MANY


def target_outcome(finished: RequestFinished) -> TargetOutcome | None:
    """None for requests that do not measure the service: the client left or made an error, or it is a batch's line."""
    if finished.is_batch:
        return None
    if failed(finished):
        return TargetOutcome.FAILED
    if finished.reason:
        return None
    if 0.0 <= finished.ttft_target_s < finished.ttft_s:
        return TargetOutcome.TTFT_MISSED
    if 0.0 <= finished.itl_target_s < finished.itl_s:
        return TargetOutcome.ITL_MISSED
    return (
        TargetOutcome.NO_TARGET if finished.ttft_target_s < 0.0 and finished.itl_target_s < 0.0 else TargetOutcome.MET
    )


def kept(finished: RequestFinished, slow_s: float) -> Kept:
    """Why the trace is worth keeping. ``slow_s``: a later first token is slow, for requests without a TTFT target."""
    if failed(finished):
        return Kept.FAILED
    if finished.resumes:
        return Kept.RESUMED
    if finished.is_batch:
        return Kept.SHARE
    waited_s = finished.ttft_s if finished.ttft_s >= 0.0 else finished.e2e_s
    late = waited_s > (finished.ttft_target_s if finished.ttft_target_s >= 0.0 else slow_s)
    return Kept.SLOW if late or 0.0 <= finished.itl_target_s < finished.itl_s else Kept.SHARE
