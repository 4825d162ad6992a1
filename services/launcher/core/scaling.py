"""Which workers to start or to stop, when the planner wishes for more or fewer of a role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.planning import ScaleFleet
from shared.contracts.workers import Role


@dataclass(frozen=True, slots=True)
class Own:
    """A worker that this launcher runs. ``is_leaving``: it was told to, and is no longer counted."""

    worker_id: str
    role: Role
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What to do; ``refusal`` says in words why it is less than was wished for."""

    start: int = 0
    stop: Sequence[str] = ()
    refusal: str = ""


def steps_for(wish: ScaleFleet, own: Sequence[Own], *, workers_min: int, workers_max: int) -> Steps:
    """``own`` in the order in which they came: who came last goes first."""
    staying = [each for each in own if not each.is_leaving]
    if wish.change >= 0:
        start = max(0, min(wish.change, workers_max - len(staying)))
        short = f"{len(staying)} workers run, --workers-max is {workers_max}"
        return Steps(start=start, refusal=short if start < wish.change else "")
    candidates = [each.worker_id for each in reversed(staying) if each.role is wish.role]
    stop = candidates[: max(0, min(-wish.change, len(staying) - workers_min))]
    if len(stop) == -wish.change:
        return Steps(stop=stop)
    if len(candidates) < -wish.change:
        return Steps(stop=stop, refusal=f"{len(candidates)} {wish.role} workers run here")
    return Steps(stop=stop, refusal=f"{len(staying)} workers run, --workers-min is {workers_min}")
