"""Which workers to start or to stop, when the planner wishes for more or fewer of a role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.planning import ScaleFleet
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

REVISION_CHARS = 12
"""Of a revision, so much goes into a refusal."""


@dataclass(frozen=True, slots=True)
class Own:
    """A worker that this launcher runs. ``is_leaving``: it was told to, and is no longer counted."""

    worker_id: str
    role: Role
    is_leaving: bool = False
    revision: str = ""
    """Empty as long as its engine has not said it."""
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What to do; ``refusal`` says in words why it is less than was wished for."""

    start: int = 0
    stop: Sequence[str] = ()
    refusal: str = ""


def own_of(worker_id: str, role_at_start: Role, record: WorkerRecord | None, *, is_leaving: bool) -> Own:
    """With the role that it has now; who is not registered yet has the one that it was started for."""
    if record is None:
        return Own(worker_id, role_at_start, is_leaving)
    revision = "" if record.phase is WorkerPhase.STARTING else record.fingerprint.revision
    return Own(worker_id, record.role, is_leaving, revision, record.epoch)


def steps_for(wish: ScaleFleet, own: Sequence[Own], *, workers_min: int, workers_max: int) -> Steps:
    """``own`` in the order in which they came: who came last goes first."""
    staying = [each for each in own if not each.is_leaving]
    if wish.change >= 0:
        if refusal := _other_revision(wish, own):
            return Steps(refusal=refusal)
        start = max(0, min(wish.change, workers_max - len(staying)))
        short = f"{len(staying)} workers run, --workers-max is {workers_max}"
        return Steps(start=start, refusal=short if start < wish.change else "")
    candidates = [each.worker_id for each in reversed(staying) if _is_meant(each, wish)]
    stop = candidates[: max(0, min(-wish.change, len(staying) - workers_min))]
    if len(stop) == -wish.change:
        return Steps(stop=stop)
    if len(candidates) < -wish.change:
        of_revision = f" of revision {_short(wish.revision)}" if wish.revision else ""
        return Steps(stop=stop, refusal=f"{len(candidates)} {wish.role} workers{of_revision} run here")
    return Steps(stop=stop, refusal=f"{len(staying)} workers run, --workers-min is {workers_min}")


def _other_revision(wish: ScaleFleet, own: Sequence[Own]) -> str:
    """Why a worker that is started here would not be of the revision that is wished for, in words. All get the same
    settings, so it is of the revision of whoever started last.
    """
    known = [each for each in own if each.revision]
    if not wish.revision:
        return ""
    if not known:
        return f"no worker that runs here says yet whether it is of revision {_short(wish.revision)}"
    newest = max(known, key=lambda each: each.epoch).revision
    if newest == wish.revision:
        return ""
    return f"what is started here is of revision {_short(newest)}, not {_short(wish.revision)}"


def _is_meant(one: Own, wish: ScaleFleet) -> bool:
    return one.role is wish.role and wish.revision in ("", one.revision)


def _short(revision: str) -> str:
    return revision[:REVISION_CHARS]
