"""Decides every few seconds, for each family of workers, whether one change would help it; keeps its newest decisions.

A change takes time, and its effect must show before the next one that rests on it: a role that got workers gets no
more than it lacked then, and gives none. A role that is short otherwise is helped at once. If the state is uncertain
(silent workers, engines that have not worked yet, a new leader), the planner changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from services.orchestrator.planner.change import Change, Possible, RoleLoad, choose
from services.orchestrator.planner.family import (
    Count,
    Family,
    FamilyWorkers,
    Key,
    by_family,
    names_of,
    revision_of,
    workers_of,
)
from services.orchestrator.planner.rules import Rules
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import Demand, PlanAction, PlanDecision, RoleCount
from shared.contracts.workers import FleetWorker, Role

REFUSED_S_MAX = 3600.0
"""Longest pause before a refused change is requested again; the pause doubles with each refusal."""
CHANGES_MAX = 200


@dataclass(frozen=True, slots=True)
class Refusals:
    """Refusals in a row, and the time before which the change is not requested again."""

    times: int = 0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The last change that gave workers to a role."""

    until: float
    """When its effect must show."""
    wanted: int
    """How many workers the role needed, by what was known then. 0: the change may not have been made, so that
    nothing more is concluded from the role's work.
    """


NO_GROWTH = Growth(0.0, 0)


@dataclass(slots=True)
class Restraint:
    """Why a family is not changed for a while. Times are monotonic seconds."""

    is_ambiguous: bool = False
    """Another family has the same model and revision. The scaler cannot tell them apart, so it is not asked."""
    under_way: int = 0
    """Number of the decision being carried out; 0: none."""
    cools_down_until: float = 0.0
    """No worker is removed before."""
    grown: dict[Role, Growth] = field(default_factory=dict)
    refused: dict[bool, Refusals] = field(default_factory=dict)
    """Key: whether it was for more workers."""
    expected: dict[Role, tuple[int, float]] = field(default_factory=dict)
    """How many workers the role should soon have, and until when they are expected."""
    refusing: dict[WorkerId, float] = field(default_factory=dict)
    """Workers that refused another role, and until when they are not asked again."""


class Planner:
    """Plans all families. Times are monotonic seconds."""

    def __init__(self, rules: Rules, now: float) -> None:
        self.log = PlanLog()
        self._rules = rules
        self._number = 0
        self._families: dict[Key, Family] = {}
        self._restraints: dict[Key, Restraint] = {}
        self._key_of: dict[WorkerId, Key] = {}
        self._names: dict[Key, frozenset[str]] = {}
        """What requests for the family may name: the model's names and its LoRA adapters."""
        self._leads_since = now

    def leads(self, now: float) -> None:
        """Lead from now on, without knowing what the predecessor began."""
        self._leads_since = now
        self._restraints.clear()

    def reported(self, load: LoadReport, now: float) -> None:
        """A load report has come. A worker not known yet will report again soon."""
        if key := self._key_of.get(load.worker_id):
            self._families[key].reported(load, now)

    def ended(self, request: RequestFinished, now: float) -> None:
        """A request has ended: in the family of its workers, or if none served it, in all families of its model."""
        key = self._key_of.get(WorkerId(request.decode_worker)) or self._key_of.get(WorkerId(request.prefill_worker))
        if key is not None:
            self._families[key].ended(request, now)
            return
        for key, family in self._families.items():
            if request.model in self._names[key]:
                family.ended(request, now)

    def update(self, workers: Sequence[FleetWorker], now: float) -> dict[Key, list[FleetWorker]]:
        """Update the families; returns the workers by family."""
        by_key = by_family(workers)
        self._families = {
            key: self._families.get(key) or Family(self._rules.of(key[0]), now, revision_of(key, mine))
            for key, mine in by_key.items()
        }
        self._key_of = {each.record.worker_id: key for key, family in by_key.items() for each in family}
        self._names = {key: names_of(family) for key, family in by_key.items()}
        return by_key

    def plan(self, workers: Sequence[FleetWorker], now: float, wall_ms: int) -> list[PlanDecision]:
        """One decision for each family."""
        families = self.update(workers, now)
        decisions = []
        for key, mine in families.items():
            restraint = self._restraints.setdefault(key, Restraint())
            restraint.is_ambiguous = self._is_ambiguous(key)
            decisions.append(self._decide(key, workers_of(mine, self._rules.start_s_max), now, wall_ms))
        self.log.add(decisions)
        return decisions

    def set_outcome(self, decision: PlanDecision, *, done: bool, outcome: str, now: float) -> PlanDecision:
        """A change was made or refused. Returns the decision with its outcome."""
        restraint = self._restraints.setdefault((decision.model, decision.fingerprint), Restraint())
        restraint.under_way = 0
        if done or decision.action is PlanAction.CHANGE_ROLE:
            # The worker may have changed its role although its reply was lost.
            restraint.cools_down_until = until = now + self._rules.cool_down_s
            if decision.role is not None and decision.change >= 0:
                wanted = restraint.grown.get(decision.role, NO_GROWTH).wanted if done else 0
                restraint.grown[decision.role] = Growth(until, wanted)
        if decision.action is PlanAction.CHANGE_ROLE and not done:
            restraint.refusing[decision.worker_id] = now + self._rules.refused_s
        if decision.action is PlanAction.SCALE:
            self._note_scaling(restraint, decision, now, done=done)
        return self.log.set_outcome(decision.number, outcome) or decision

    def _note_scaling(self, restraint: Restraint, decision: PlanDecision, now: float, *, done: bool) -> None:
        """After each refusal in a row the next request waits twice as long."""
        for_more = decision.change > 0
        times = restraint.refused.get(for_more, Refusals()).times
        pause_s = min(self._rules.refused_s * 2.0**times, REFUSED_S_MAX)
        restraint.refused[for_more] = Refusals() if done else Refusals(times + 1, now + pause_s)
        if not done and decision.role is not None:
            restraint.expected.pop(decision.role, None)

    def advised(self, decision: PlanDecision, now: float) -> PlanDecision:
        """The change is advice only, repeated after the cool-down. Returns the decision with its outcome."""
        updated = self.set_outcome(decision, done=True, outcome="advice only", now=now)
        restraint = self._restraints[decision.model, decision.fingerprint]
        restraint.expected.clear()
        restraint.grown = {role: Growth(growth.until, 0) for role, growth in restraint.grown.items()}
        return updated

    def _decide(self, key: Key, workers: FamilyWorkers, now: float, wall_ms: int) -> PlanDecision:
        family, restraint = self._families[key], self._restraints[key]
        roles: list[RoleLoad] = []
        demand = Demand()
        if unknown := family.unknown(workers, now):
            family.steadiness.clear()
            choice = Change(why=f"nothing is decided: {unknown}")
        else:
            workers = _with_expected(workers, restraint, now)
            work, demand = family.sample(workers, now)
            roles = family.roles(workers, work, now)
            choice = self._choose(roles, workers, family.rules, restraint, now)
        worker_id = _worker_to_change(choice, workers, restraint, now)
        self._number += 1
        decision = PlanDecision(
            number=self._number,
            at_ms=wall_ms,
            model=key[0],
            fingerprint=key[1],
            revision=family.revision,
            demand=demand,
            roles=_role_counts(roles, workers),
            action=choice.action,
            worker_id=worker_id,
            role=choice.role,
            change=choice.change,
            why=choice.why,
        )
        self._begin(decision, choice, workers, restraint, now)
        return decision

    def _is_ambiguous(self, key: Key) -> bool:
        """Whether another family has the same model and revision."""
        model, revision = key[0], self._families[key].revision
        siblings = [each.revision for other, each in self._families.items() if other[0] == model and other != key]
        return bool(siblings) and (not revision or revision in siblings)

    def _choose(
        self, roles: list[RoleLoad], workers: FamilyWorkers, rules: Rules, restraint: Restraint, now: float
    ) -> Change:
        """The most useful change, unless the family must not be changed now."""
        if not roles:
            return Change(why=f"nothing is decided before {self._rules.lasting_s:.0f} s of observation")
        if restraint.under_way:
            return Change(why=f"decision {restraint.under_way} is being carried out")
        choice = choose(roles, rules, _possible(roles, workers, restraint, now))
        led_s = self._leads_since + self._rules.cool_down_s - now
        if led_s > 0.0 and choice.action is not PlanAction.NOTHING:
            return Change(why=f"{choice.why}; a new leader decides in {led_s:.0f} s")
        return choice

    def _begin(
        self, decision: PlanDecision, choice: Change, workers: FamilyWorkers, restraint: Restraint, now: float
    ) -> None:
        if decision.role is None:
            return
        restraint.under_way = decision.number
        expected = restraint.expected
        if decision.action is PlanAction.CHANGE_ROLE:
            for role, more in ((decision.role, 1), (choice.giver, -1)):
                if role in expected:
                    soon, until = expected[role]
                    expected[role] = (soon + more, until)
        elif decision.change > 0:
            expected[decision.role] = (
                workers.counts[decision.role].all + decision.change,
                now + self._rules.start_s_max,
            )
        else:
            expected.pop(decision.role, None)
        if choice.wanted:
            restraint.grown[decision.role] = Growth(now, choice.wanted)


def _possible(roles: list[RoleLoad], workers: FamilyWorkers, restraint: Restraint, now: float) -> Possible:
    """What may be asked for now."""
    no_growth, no_removal = (
        "another fingerprint has the same model and revision"
        if restraint.is_ambiguous
        else f"the scaler refused, and is asked again in {refused_s:.0f} s"
        if (refused_s := restraint.refused.get(more, Refusals()).until - now) > 0.0
        else ""
        for more in (True, False)
    )
    cools_s = restraint.cools_down_until - now
    if not no_removal and cools_s > 0.0:
        no_removal = f"the last change must show first, for {cools_s:.0f} s"
    counts_max, gives_none = {}, {}
    for each in roles:
        growth = restraint.grown.get(each.role, NO_GROWTH)
        if now < growth.until:
            why = f"the workers that it got must show first, for {growth.until - now:.0f} s"
            gives_none[each.role] = f"{each.role} gives none: {why}"
            if not (growth.wanted and each.falls_behind):
                counts_max[each.role] = (growth.wanted, why)
        elif not _willing(each.role, workers, restraint, now):
            gives_none[each.role] = f"all {each.role} workers refuse another role"
    return Possible(no_growth=no_growth, no_removal=no_removal, counts_max=counts_max, gives_none=gives_none)


def _with_expected(workers: FamilyWorkers, restraint: Restraint, now: float) -> FamilyWorkers:
    """The workers, with those that were asked for and are not registered yet."""
    counts = dict(workers.counts)
    for role, (soon, until) in list(restraint.expected.items()):
        count = counts[role]
        if count.ready >= soon or now >= until:
            del restraint.expected[role]
        else:
            counts[role] = Count(count.ready, max(count.coming, soon - count.ready))
    return FamilyWorkers(workers.ready, counts)


def _willing(role: Role, workers: FamilyWorkers, restraint: Restraint, now: float) -> list[FleetWorker]:
    """The ready workers of this role that have not refused another one lately."""
    return [each for each in workers.of(role) if restraint.refusing.get(each.record.worker_id, now) <= now]


def _worker_to_change(choice: Change, workers: FamilyWorkers, restraint: Restraint, now: float) -> WorkerId:
    """The least busy worker that may change its role."""
    if choice.giver is None:
        return WorkerId("")
    willing = _willing(choice.giver, workers, restraint, now)
    return min(willing, key=lambda each: (each.running + each.waiting, each.record.worker_id)).record.worker_id


def _role_counts(roles: list[RoleLoad], workers: FamilyWorkers) -> list[RoleCount]:
    if not roles:
        return [
            RoleCount(role=role, now=count.ready, wanted=count.all)
            for role, count in workers.counts.items()
            if count.all
        ]
    return [RoleCount(role=each.role, now=each.ready, wanted=each.wanted(), load=each.load) for each in roles]


class PlanLog:
    """The newest changes, and the last decision on each family."""

    def __init__(self) -> None:
        self._changes: deque[PlanDecision] = deque(maxlen=CHANGES_MAX)
        self._last: list[PlanDecision] = []

    def add(self, decisions: Sequence[PlanDecision]) -> None:
        """The decisions of one sample of all families."""
        self._changes.extend(each for each in decisions if each.action is not PlanAction.NOTHING)
        self._last = list(decisions)

    def set_outcome(self, number: int, outcome: str) -> PlanDecision | None:
        """Set a change's outcome; returns the updated decision, None if it is forgotten."""
        for index, decision in enumerate(self._changes):
            if decision.number == number:
                updated = self._changes[index] = msgspec.structs.replace(decision, outcome=outcome)
                return updated
        return None

    def newest(self, count_max: int) -> list[PlanDecision]:
        """The newest first, at most so many."""
        # A change of the last sample has its outcome in ``_changes``.
        every = {decision.number: decision for decision in (*self._last, *self._changes)}
        return [every[number] for number in sorted(every, reverse=True)[: max(0, count_max)]]
