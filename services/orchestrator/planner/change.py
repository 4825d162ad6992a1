"""Which change a fleet needs most: a worker in another role, more workers, fewer workers, or none.

Why it does not oscillate: a role is too small when its load was above ``load_max`` at *all* looks of a short time, and
is then made so large that its load is ``FILL`` of that. A worker is spared only when at *all* looks of a long time its
role could have done without it and would have had less than ``SPARE`` of ``load_max``. What has just been added is
therefore spared only when demand has fallen by a third, and for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.steadiness import Seen
from shared.contracts.planning import PlanAction
from shared.contracts.workers import Role

FILL = 0.8
SPARE = 0.65
GAIN = 0.8
"""Where no worker can be had, one changes its role if the fullest role is then fuller by no more than this part."""
COUNT_MAX = 4096


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The workers of one role, and the work that comes for them."""

    role: Role
    ready: int
    coming: int
    """Started or asked for, and not ready yet."""
    helped: float
    """What workers of both roles give to this one, in workers."""
    seen: Seen
    """The work that comes for them."""
    load_max: Callable[[float], float]
    """By how many workers there are."""
    minimum: int

    @property
    def size(self) -> float:
        """Of the role, with what comes and what helps."""
        return self.ready + self.coming + self.helped

    @property
    def load(self) -> float:
        """At this look, of those that are ready; with none, as if there were one."""
        return self.seen.now / max(self.ready + self.helped, 1.0)

    def fullness(self, work: float, workers: float) -> float:
        """Load over what is allowed: above 1 it is too much."""
        return work / workers / self.load_max(workers) if workers > 0.0 else COUNT_MAX * work

    @property
    def is_short(self) -> bool:
        """Whether it lacks workers, and lastingly."""
        return self.fullness(self.seen.lasting, self.size) > 1.0

    def wanted(self) -> int:
        """How many workers it should have, coming from how many it has."""
        count = self.ready + self.coming
        if self.is_short:
            while count < COUNT_MAX and self.fullness(self.seen.lasting, count + self.helped) > FILL:
                count += 1
            return count
        while count > self.minimum and self.fullness(self.seen.hold, count - 1 + self.helped) <= SPARE:
            count -= 1
        return max(count, self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to do, and why."""

    action: PlanAction = PlanAction.NOTHING
    role: Role | None = None
    giver: Role | None = None
    """CHANGE_ROLE: whose worker it is until now."""
    change: int = 0
    why: str = ""


def choose(roles: Sequence[RoleLoad], rules: Rules, *, can_grow: bool, can_shrink: bool) -> Choice:
    """The one change that helps most. ``can_grow``, ``can_shrink``: whether more or fewer workers may be asked for."""
    short = sorted(
        (each for each in roles if each.is_short), key=lambda each: -each.fullness(each.seen.lasting, each.size)
    )
    if missing := [each for each in roles if each.ready + each.coming < each.minimum]:
        short = [*missing, *(each for each in short if each not in missing)]
    whys = []
    for one in short:
        choice = _help(one, roles, rules, can_grow=can_grow)
        if choice.action is not PlanAction.NOTHING:
            return choice
        whys.append(choice.why)
    if whys:
        return Choice(why="; ".join(whys))
    if any(each.coming for each in roles):
        return Choice(why="workers are starting")
    return _spare(roles, rules, can_shrink=can_shrink)


def _help(one: RoleLoad, roles: Sequence[RoleLoad], rules: Rules, *, can_grow: bool) -> Choice:
    """A worker of the other role if that has one to spare, else new ones, else the lesser evil."""
    full = f"{one.role} has {one.seen.lasting:.1f} workers' worth of work for {one.size:.3g}"
    giver = next((each for each in roles if each.role is not one.role and each.ready > each.minimum), None)
    if giver is not None and _without(giver, giver.seen.spare, one) <= SPARE:
        return _switch(giver, one, f"{full}, and {giver.role} can spare one")
    room = rules.workers_max - sum(each.ready + each.coming for each in roles) if rules.workers_max else rules.step_max
    more = min(one.wanted() - one.ready - one.coming, rules.step_max, room)
    if can_grow and more > 0:
        return Choice(action=PlanAction.SCALE, role=one.role, change=more, why=full)
    if giver is not None:
        after = max(one.fullness(one.seen.lasting, one.size + 1), _without(giver, giver.seen.lasting, one))
        if after <= GAIN * one.fullness(one.seen.lasting, one.size):
            return _switch(giver, one, f"{full}, no worker can be had, and {giver.role} is less full")
    return Choice(why=f"{full}; no worker can be had, and no other role has one to spare")


def _without(giver: RoleLoad, work: float, taker: RoleLoad) -> float:
    """How full ``giver`` would be with one worker less, when what waits for ``taker`` has come through to it."""
    held_back = max(1.0, taker.seen.lasting / taker.size) if taker.size else 1.0
    return giver.fullness(work * held_back, giver.size - 1)


def _switch(giver: RoleLoad, taker: RoleLoad, why: str) -> Choice:
    return Choice(action=PlanAction.CHANGE_ROLE, role=taker.role, giver=giver.role, why=why)


def _spare(roles: Sequence[RoleLoad], rules: Rules, *, can_shrink: bool) -> Choice:
    total = sum(each.ready for each in roles)
    spare = [each for each in roles if each.wanted() < each.ready]
    if not spare:
        return Choice(why="as it should be")
    if total <= rules.workers_min:
        return Choice(why=f"some could be spared, but {rules.workers_min} is the least")
    if not can_shrink:
        return Choice(why="some could be spared, but nobody takes them")
    one = min(spare, key=lambda each: each.fullness(each.seen.hold, each.size - 1))
    why = (
        f"for {rules.hold_s:.0f} s {one.role} had at most {one.seen.hold:.1f} workers' worth of work for {one.size:.3g}"
    )
    return Choice(action=PlanAction.SCALE, role=one.role, change=-1, why=why)
