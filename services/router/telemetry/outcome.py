"""How a request that has ended is to be seen: whether it kept its targets, and whether its trace is worth keeping."""

from __future__ import annotations

from enum import StrEnum

from shared.contracts.inference import RequestFinished

SERVER_ERROR = 500
TOO_MANY = 429


class Kept(StrEnum):
    """Why a trace is kept."""

    FAILED = "failed"
    RESUMED = "resumed"
    SLOW = "slow"
    SHARE = "share"
    """Nothing is odd about it: it is one of the share that is traced anyway."""


class Goal(StrEnum):
    """What became of a request's targets."""

    MET = "met"
    TTFT_MISSED = "ttft_missed"
    ITL_MISSED = "itl_missed"
    FAILED = "failed"
    """No answer, or not all of it: as far from its targets as can be."""
    NO_TARGET = "no_target"


def failed(told: RequestFinished) -> bool:
    """Through no fault of its client, which neither left nor asked for what there is not."""
    return told.status >= SERVER_ERROR or told.status == TOO_MANY


def goal(told: RequestFinished) -> Goal | None:
    """None: its client left, or was told its own mistake; that says nothing of how well it was served."""
    if failed(told):
        return Goal.FAILED
    if told.reason:
        return None
    if 0.0 <= told.ttft_target_s < told.ttft_s:
        return Goal.TTFT_MISSED
    if 0.0 <= told.itl_target_s < told.itl_s:
        return Goal.ITL_MISSED
    return Goal.NO_TARGET if told.ttft_target_s < 0.0 and told.itl_target_s < 0.0 else Goal.MET


def kept(told: RequestFinished, slow_s: float) -> Kept:
    """``slow_s``: a first token that comes later is slow, where the request has no target that says otherwise."""
    if failed(told):
        return Kept.FAILED
    if told.resumes:
        return Kept.RESUMED
    waited_s = told.ttft_s if told.ttft_s >= 0.0 else told.e2e_s
    late = waited_s > (told.ttft_target_s if told.ttft_target_s >= 0.0 else slow_s)
    return Kept.SLOW if late or 0.0 <= told.itl_target_s < told.itl_s else Kept.SHARE
