"""Results of a replay with a planner, and of the fixed fleets for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.planned_replay import Delays, PlannedWorld
from bench.study.results import Slo, summarise
from replay.profile import Profile
from replay.split import Split
from replay.traces import Request
from services.orchestrator.planner.rules import Rules
from services.router.admission.policy import AdmissionPolicy
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import Role

Changes = Sequence[tuple[float, PlanDecision]]
UNDONE_S = 600.0
"""A change that is undone within so long need not have been made."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """Everything but the fleet."""

    requests: list[Request]
    profile: Profile
    slo: Slo
    delays: Delays
    hours: float
    admission: AdmissionPolicy | None
    """None: requests go to the engines at once and wait there."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one fleet."""

    name: str
    split: Split
    """On average, rounded; of a fixed fleet: as it was."""
    workers_mean: float
    workers_max: int
    worker_hours: float
    good: float
    """Share of all requests that met both targets; rejected ones did not."""
    ttft_p50: float
    ttft_p95: float
    """Of those that were served."""
    itl_p95: float
    refused: float
    """Share of all requests."""
    switches: int = 0
    scalings: int = 0
    undone: int = 0
    grown: tuple[int, int] = (0, 0)
    """Prefill and decode workers that were asked for."""


def run(course: Course, split: Split, name: str, rules: Rules | None = None) -> tuple[Outcome, PlannedWorld]:
    """One fleet; with ``rules`` one that is planned."""
    world = PlannedWorld(split, course.profile, course.slo, rules, course.delays)
    if course.admission is not None:
        world.admit(course.admission)
    outcomes = world.run(course.requests)
    result = summarise((name, 1.0, ""), outcomes, [*world.workers.values(), *world.left], course.slo, 0.0)
    ttft = sorted(replayed.ttft_s for replayed in outcomes if replayed.finished_at is not None)
    sizes, changes = world.sizes, world.changes
    mean = sum(size.all for size in sizes) / len(sizes)
    prefill, decode = (sum(getattr(size, role) for size in sizes) for role in ("prefill", "decode"))
    share = prefill / (prefill + decode)
    outcome = Outcome(
        name=name,
        split=split_by(math.ceil(mean - 1e-9), share),
        workers_mean=mean,
        workers_max=max(size.all for size in sizes),
        worker_hours=mean * course.hours,
        good=result.good_share,
        ttft_p50=ttft[len(ttft) // 2],
        ttft_p95=ttft[int(len(ttft) * 0.95)],
        itl_p95=result.itl.p95,
        refused=result.refused / len(outcomes),
        switches=sum(each.action is PlanAction.CHANGE_ROLE for _at, each in changes),
        scalings=sum(each.action is PlanAction.SCALE for _at, each in changes),
        undone=len(undone(changes, UNDONE_S)),
        grown=(grown(changes, Role.PREFILL), grown(changes, Role.DECODE)),
    )
    return outcome, world


def splits(course: Course, start: Split) -> Iterator[Outcome]:
    """Fixed fleets of one size: uphill from ``start``, for as long as more requests are good than before."""
    size = start.prefill + start.decode
    first = best = run(course, start, "fixed")[0]
    yield first
    for way in (-1, 1):
        prefill = start.prefill + way
        while 0 < prefill < size and (best is first or best.split.prefill == prefill - way):
            tried = run(course, Split(prefill=prefill, decode=size - prefill), "fixed")[0]
            yield tried
            if tried.good <= best.good:
                break
            best, prefill = tried, prefill + way


def split_by(size: int, share: float) -> Split:
    """So many workers, of which that share computes prompts; at least one of each."""
    size = max(2, size)
    prefill = min(max(1, round(size * share)), size - 1)
    return Split(prefill=prefill, decode=size - prefill)


def ways(decision: PlanDecision) -> dict[Role, bool]:
    """By role whether it grows."""
    assert decision.role is not None
    if decision.action is PlanAction.SCALE:
        return {decision.role: decision.change > 0}
    giver = Role.DECODE if decision.role is Role.PREFILL else Role.PREFILL
    return {decision.role: True, giver: False}


def undone(changes: Changes, within_s: float) -> list[tuple[float, PlanDecision]]:
    """Changes by which a role grows that shrank within so long before, or the other way round."""
    found = []
    for index, (at, change) in enumerate(changes):
        recent = [ways(earlier) for when, earlier in changes[:index] if at - when <= within_s]
        if any(way.get(role, grows) is not grows for way in recent for role, grows in ways(change).items()):
            found.append((at, change))
    return found


def grown(changes: Changes, role: Role) -> int:
    """Workers of a role that were asked for, or came to it from another."""
    return sum(max(each.change, 1) for _at, each in changes if ways(each).get(role))
