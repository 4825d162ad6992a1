"""Choose the change that a fleet needs most: a worker in another role, more workers, fewer workers, or none.

A short role gets a worker of a role that can spare one, which takes a second; a new one starts for minutes. While a
role fills up, no worker is removed, because that role may need it.

Why it does not oscillate: a role is too small when its load exceeds ``load_max`` in *all* samples of a short time. It
is then enlarged until its load is ``FILL`` of that. A worker is removed only when in *all* samples of a long time its
role would have had less than ``SPARE`` of ``load_max`` without it. So an added worker is removed only after demand has
fallen by a third for a long time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.work import Observed
from shared.contracts.planning import PlanAction
from shared.contracts.workers import Role

FILL = 0.8
SPARE = 0.65
GAIN = 0.8
"""If no worker can be added, one changes its role when that lowers the load of the fullest role to this share."""
COUNT_MAX = 4096


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The workers of one role, and their work."""

    role: Role
    ready: int
    coming: int
    """Starting or asked for, not ready yet."""
    helped: float
    """Share of the workers with both roles that works for this one, in workers."""
    observed: Observed
    load_max: Callable[[float], float]
    """Highest load of a worker, as a function of the number of workers."""
    minimum: int
    cause: str
    """What makes the work, as text."""

    @property
    def size(self) -> float:
        """All workers: ready, coming and helping."""
        return self.ready + self.coming + self.helped

    @property
    def load(self) -> float:
        """In the last sample, of the ready workers; with none, as if there were one."""
        return self.observed.now / max(self.ready + self.helped, 1.0)

    def fullness(self, work: float, workers: float) -> float:
        """Load relative to its limit: above 1 the role is too small."""
        return work / workers / self.load_max(workers) if workers > 0.0 else COUNT_MAX * work

    @property
    def is_short(self) -> bool:
        """Whether the role has lacked workers for ``lasting_s``."""
        return self.fullness(self.observed.lasting, self.size) > 1.0

    @property
    def fills_up(self) -> bool:
        """Whether the role lacks workers now, or will in ``lasting_s`` if its work grows on as it does."""
        return self.fullness(2.0 * self.observed.now - self.observed.lasting, self.size) > 1.0

    @property
    def falls_behind(self) -> bool:
        """Whether what waits for it grows although all its workers are ready: its work was underestimated."""
        return not self.coming and self.observed.queue_grows

    def wanted(self) -> int:
        count = self.ready + self.coming
        if self.is_short:
            while count < COUNT_MAX and self.fullness(self.observed.lasting, count + self.helped) > FILL:
                count += 1
            return count
        while count > self.minimum and self.fullness(self.observed.hold, count - 1 + self.helped) <= SPARE:
            count -= 1
        return max(count, self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    action: PlanAction = PlanAction.NOTHING
    role: Role | None = None
    giver: Role | None = None
    """CHANGE_ROLE: the worker's present role."""
    change: int = 0
    wanted: int = 0
    """How many workers ``role`` should have after this change and those that follow from it; 0: it gets none."""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Possible:
    """Which changes may be asked for. A text says why not; empty: they may."""

    no_growth: str = ""
    no_removal: str = ""
    counts_max: Mapping[Role, tuple[int, str]] = field(default_factory=dict)
    """Roles that get workers, new ones or another role's, up to this number only, and why."""
    gives_none: Mapping[Role, str] = field(default_factory=dict)
    """Roles of which no worker may take another one."""


def choose(roles: Sequence[RoleLoad], rules: Rules, possible: Possible) -> Change:
    """The most useful change."""
    short = sorted(
        (each for each in roles if each.is_short), key=lambda each: -each.fullness(each.observed.lasting, each.size)
    )
    if missing := [each for each in roles if each.ready + each.coming < each.minimum]:
        short = [*missing, *(each for each in short if each not in missing)]
    whys = []
    for one in short:
        choice = _help(one, roles, rules, possible)
        if choice.action is not PlanAction.NOTHING:
            return choice
        whys.append(choice.why)
    if whys:
        return Change(why="; ".join(whys))
    if any(each.coming for each in roles):
        return Change(why="workers are starting")
    return _scale_down(roles, rules, possible)


def _addable(roles: Sequence[RoleLoad], rules: Rules) -> int:
    """Workers that one change may add."""
    if not rules.workers_max:
        return rules.step_max
    return min(rules.step_max, rules.workers_max - sum(each.ready + each.coming for each in roles))


def _help(one: RoleLoad, roles: Sequence[RoleLoad], rules: Rules, possible: Possible) -> Change:
    """A worker of the other role if that can spare one, else new workers, else the change that does least harm."""
    full = f"{one.role} has {one.observed.lasting:.1f} workers' worth of work for {one.size:.3g} ({one.cause})"
    count_max, why = possible.counts_max.get(one.role, (COUNT_MAX, ""))
    if one.ready + one.coming >= count_max:
        return Change(why=f"{full}; {why}")
    wanted = min(one.wanted(), count_max)
    others = [each for each in roles if each.role is not one.role and each.ready > each.minimum]
    giver = next((each for each in others if each.role not in possible.gives_none), None)
    if giver is not None and _without(giver, giver.observed.spare, one) <= SPARE:
        return _switch(giver, one, wanted, f"{full}, and {giver.role} can spare one")
    more = min(wanted - one.ready - one.coming, _addable(roles, rules))
    if not possible.no_growth and more > 0:
        return Change(action=PlanAction.SCALE, role=one.role, change=more, wanted=wanted, why=full)
    none = possible.no_growth or f"{rules.workers_max} workers is the maximum"
    if giver is not None:
        after = max(one.fullness(one.observed.lasting, one.size + 1), _without(giver, giver.observed.lasting, one))
        if after <= GAIN * one.fullness(one.observed.lasting, one.size):
            return _switch(
                giver, one, wanted, f"{full}; no worker can be added ({none}), and {giver.role} is less full"
            )
    kept = [possible.gives_none[each.role] for each in others if each.role in possible.gives_none]
    return Change(why="; ".join([full, f"no worker can be added ({none})", *(kept or ["no other role can spare one"])]))


def _without(giver: RoleLoad, work: float, taker: RoleLoad) -> float:
    """How full ``giver`` would be with one worker less, once the work that waits for ``taker`` reaches it."""
    held_back = max(1.0, taker.observed.lasting / taker.size) if taker.size else 1.0
    return giver.fullness(work * held_back, giver.size - 1)


def _switch(giver: RoleLoad, taker: RoleLoad, wanted: int, why: str) -> Change:
    return Change(action=PlanAction.CHANGE_ROLE, role=taker.role, giver=giver.role, wanted=wanted, why=why)


def _scale_down(roles: Sequence[RoleLoad], rules: Rules, possible: Possible) -> Change:
    total = sum(each.ready for each in roles)
    spare = [each for each in roles if each.wanted() < each.ready]
    if not spare:
        return Change(why="the fleet fits its load")
    one = min(spare, key=lambda each: each.fullness(each.observed.hold, each.size - 1))
    if filling := next((each for each in roles if each.fills_up), None):
        now = f"{filling.observed.now:.1f} workers' worth of work for {filling.size:.3g} now"
        return Change(why=f"{one.role} could spare one, but {filling.role} has {now} ({filling.cause}) and may need it")
    if total <= rules.workers_min:
        return Change(why=f"some could be spared, but {rules.workers_min} is the minimum")
    if possible.no_removal:
        return Change(why=f"some could be spared, but {possible.no_removal}")
    work = f"{one.observed.hold:.1f} workers' worth of work"
    why = f"for {rules.hold_s:.0f} s {one.role} had at most {work} for {one.size:.3g}"
    return Change(action=PlanAction.SCALE, role=one.role, change=-1, why=why)
