"""Decides which workers to start or to drain for a scale request of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.planning import ScaleFleet
from shared.contracts.workers import WITHOUT_ENGINE, Role, WorkerRecord

REVISION_CHARS = 12
"""Characters of a revision in a refusal."""


@dataclass(frozen=True, slots=True)
class OwnWorker:
    """A worker of this launcher. ``is_leaving``: it was ordered to drain and no longer counts."""

    worker_id: str
    role: Role
    is_leaving: bool = False
    revision: str = ""
    """Empty until its engine has reported it."""
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What to do; ``refusal`` says why it is less than requested."""

    start: int = 0
    stop: Sequence[str] = ()
    refusal: str = ""


def own_worker(worker_id: str, role_at_start: Role, record: WorkerRecord | None, *, is_leaving: bool) -> OwnWorker:
    """With its present role; before it registers, with the role that it was started for."""
    if record is None:
        return OwnWorker(worker_id, role_at_start, is_leaving)
    revision = "" if record.phase in WITHOUT_ENGINE else record.fingerprint.revision
    return OwnWorker(worker_id, record.role, is_leaving, revision, record.epoch)


def steps_for(request: ScaleFleet, own: Sequence[OwnWorker], *, workers_min: int, workers_max: int) -> Steps:
    """``own`` in start order; the newest workers drain first."""
    staying = [each for each in own if not each.is_leaving]
    if request.change >= 0:
        if refusal := _other_revision(request, own):
            return Steps(refusal=refusal)
        start = max(0, min(request.change, workers_max - len(staying)))
        short = f"{len(staying)} workers run, --workers-max is {workers_max}"
        return Steps(start=start, refusal=short if start < request.change else "")
    candidates = [each.worker_id for each in reversed(staying) if _matches(each, request)]
    stop = candidates[: max(0, min(-request.change, len(staying) - workers_min))]
    if len(stop) == -request.change:
        return Steps(stop=stop)
    if len(candidates) < -request.change:
        of_revision = f" of revision {_short(request.revision)}" if request.revision else ""
        return Steps(stop=stop, refusal=f"{len(candidates)} {request.role} workers{of_revision} run here")
    return Steps(stop=stop, refusal=f"{len(staying)} workers run, --workers-min is {workers_min}")


def _other_revision(request: ScaleFleet, own: Sequence[OwnWorker]) -> str:
    """Why a new worker would not have the requested revision; empty if it would. All workers get the same settings,
    so a new one has the revision of the newest.
    """
    known = [each for each in own if each.revision]
    if not request.revision:
        return ""
    if not known:
        return f"no worker here has reported its revision yet, {_short(request.revision)} was requested"
    newest = max(known, key=lambda each: each.epoch).revision
    if newest == request.revision:
        return ""
    return f"new workers here have revision {_short(newest)}, not {_short(request.revision)}"


def _matches(one: OwnWorker, request: ScaleFleet) -> bool:
    return one.role is request.role and request.revision in ("", one.revision)


def _short(revision: str) -> str:
    return revision[:REVISION_CHARS]
