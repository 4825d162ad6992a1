"""Looks at each family of workers every few seconds and decides whether one change would help it.

A change takes its time, and then its effect must show: meanwhile nothing else is changed. What is not known for
certain (silent workers, engines never seen at work, a leader that has just begun) is a reason to do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.orchestrator.planner.change import Choice, RoleLoad, choose
from services.orchestrator.planner.family import Count, Crew, Family, Key, by_family, crew_of, revision_of
from services.orchestrator.planner.plan_log import PlanLog
from services.orchestrator.planner.rules import Rules
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import Demand, PlanAction, PlanDecision, RoleCount
from shared.contracts.workers import FleetWorker, Role

REFUSED_S_MAX = 3600.0
"""However often a wish was refused, so long after it is told again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """So often in a row, and not to be wished again until then."""

    times: int = 0
    until: float = 0.0


@dataclass(slots=True)
class Restraint:
    """Why a family is left alone for a while. Instants."""

    has_double: bool = False
    """Others of its model and revision are served that differ in something else: who scales cannot tell them apart, so
    it is not asked.
    """
    under_way: int = 0
    """Number of the decision that is being carried out."""
    quiet_until: float = 0.0
    refused: dict[bool, Refused] = field(default_factory=dict)
    """By whether it was for more workers or for fewer."""
    expected: dict[Role, tuple[int, float]] = field(default_factory=dict)
    """How many workers there should soon be, and until when that is believed."""
    unwilling: dict[WorkerId, float] = field(default_factory=dict)
    """Workers that did not take another role, and until when they are not asked again."""


class Planner:
    """Of all families. Times are monotonic seconds."""

    def __init__(self, rules: Rules, now: float) -> None:
        self.log = PlanLog()
        self._rules = rules
        self._number = 0
        self._families: dict[Key, Family] = {}
        self._restraints: dict[Key, Restraint] = {}
        self._key_of: dict[WorkerId, Key] = {}
        self._leads_since = now

    def leads(self, now: float) -> None:
        """From now on it is this planner that acts; what the last one began is not known to it."""
        self._leads_since = now
        self._restraints.clear()

    def reported(self, load: LoadReport, now: float) -> None:
        """A worker told its load; whoever is not known yet is heard again soon."""
        if key := self._key_of.get(load.worker_id):
            self._families[key].reported(load, now)

    def ended(self, request: RequestFinished, now: float) -> None:
        """A request ended: at the family of its workers, or where nobody served it, at all of its model."""
        key = self._key_of.get(WorkerId(request.decode_worker)) or self._key_of.get(WorkerId(request.prefill_worker))
        if key is not None:
            self._families[key].ended(request, now)
            return
        for (model, _fingerprint), family in self._families.items():
            if model == request.model:
                family.ended(request, now)

    def knows(self, workers: Sequence[FleetWorker], now: float) -> dict[Key, list[FleetWorker]]:
        """The fleet as it is now, by family."""
        by_key = by_family(workers)
        self._families = {
            key: self._families.get(key) or Family(self._rules, now, revision_of(key, mine))
            for key, mine in by_key.items()
        }
        self._key_of = {each.record.worker_id: key for key, family in by_key.items() for each in family}
        return by_key

    def look(self, workers: Sequence[FleetWorker], now: float, wall_ms: int) -> list[PlanDecision]:
        """One decision for each family."""
        families = self.knows(workers, now)
        decisions = []
        for key, mine in families.items():
            restraint = self._restraints.setdefault(key, Restraint())
            restraint.has_double = self._has_double(key)
            decisions.append(self._look_at(key, crew_of(mine, self._rules.start_s_max), now, wall_ms))
        self.log.looked(decisions)
        return decisions

    def came_of(self, decision: PlanDecision, *, done: bool, outcome: str, now: float) -> PlanDecision:
        """A change was carried out, or was refused. Answers the decision with its outcome."""
        restraint = self._restraints.setdefault((decision.model, decision.fingerprint), Restraint())
        restraint.under_way = 0
        if done or decision.action is PlanAction.CHANGE_ROLE:
            # An order whose answer was lost may have been carried out.
            restraint.quiet_until = now + self._rules.cool_down_s
        if decision.action is PlanAction.CHANGE_ROLE and not done:
            restraint.unwilling[decision.worker_id] = now + self._rules.refused_s
        if decision.action is PlanAction.SCALE:
            for_more = decision.change > 0
            times = restraint.refused.get(for_more, Refused()).times
            pause_s = min(self._rules.refused_s * 2.0**times, REFUSED_S_MAX)
            restraint.refused[for_more] = Refused() if done else Refused(times + 1, now + pause_s)
            if not done:
                restraint.expected.clear()
        return self.log.came_of(decision.number, outcome) or decision

    def advised(self, decision: PlanDecision, now: float) -> PlanDecision:
        """Nobody carries it out; it is said again when the cool-down is over. Answers the decision with its outcome."""
        told = self.came_of(decision, done=True, outcome="advice only", now=now)
        self._restraints[decision.model, decision.fingerprint].expected.clear()
        return told

    def _look_at(self, key: Key, crew: Crew, now: float, wall_ms: int) -> PlanDecision:
        family, restraint = self._families[key], self._restraints[key]
        roles: list[RoleLoad] = []
        demand = Demand()
        if unknown := family.unknown(crew, now):
            family.steadiness.lost_sight()
            choice = Choice(why=f"nothing is decided: {unknown}")
        else:
            crew = _expecting(crew, restraint, now)
            work, demand = family.look(crew, now)
            roles = family.roles(crew, work, now)
            choice = self._choose(roles, restraint, now)
        worker_id = _whom(choice, crew, restraint, now)
        if choice.action is PlanAction.CHANGE_ROLE and not worker_id:
            choice = Choice(why=f"{choice.why}; but none of them takes another role")
        self._number += 1
        decision = PlanDecision(
            number=self._number,
            at_ms=wall_ms,
            model=key[0],
            fingerprint=key[1],
            revision=family.revision,
            demand=demand,
            roles=_told(roles, crew),
            action=choice.action,
            worker_id=worker_id,
            role=choice.role,
            change=choice.change,
            why=choice.why,
        )
        self._begin(decision, crew, restraint, now)
        return decision

    def _has_double(self, key: Key) -> bool:
        """Whether its model and its revision do not say which family is meant."""
        model, revision = key[0], self._families[key].revision
        siblings = [each.revision for other, each in self._families.items() if other[0] == model and other != key]
        return bool(siblings) and (not revision or revision in siblings)

    def _choose(self, roles: list[RoleLoad], restraint: Restraint, now: float) -> Choice:
        """What would help, unless this is not the time for it."""
        wait_s = max(restraint.quiet_until, self._leads_since + self._rules.cool_down_s) - now
        if not roles:
            return Choice(why=f"nothing is decided before {self._rules.lasting_s:.0f} s of looking")
        if restraint.under_way:
            return Choice(why=f"decision {restraint.under_way} is being carried out")
        can_grow, can_shrink = (
            not restraint.has_double and now >= restraint.refused.get(more, Refused()).until for more in (True, False)
        )
        choice = choose(roles, self._rules, can_grow=can_grow, can_shrink=can_shrink)
        if wait_s > 0.0 and choice.action is not PlanAction.NOTHING:
            return Choice(why=f"{choice.why}; decided in {wait_s:.0f} s, if it is so then")
        return choice

    def _begin(self, decision: PlanDecision, crew: Crew, restraint: Restraint, now: float) -> None:
        if decision.action is not PlanAction.NOTHING:
            restraint.under_way = decision.number
            restraint.expected.clear()
        if decision.action is PlanAction.SCALE and decision.role is not None and decision.change > 0:
            soon = crew.counts[decision.role].all + decision.change
            restraint.expected[decision.role] = (soon, now + self._rules.start_s_max)


def _expecting(crew: Crew, restraint: Restraint, now: float) -> Crew:
    """The crew with those who were asked for and are not registered yet; who has come is expected no more."""
    counts = dict(crew.counts)
    for role, (soon, until) in list(restraint.expected.items()):
        count = counts[role]
        if count.ready >= soon or now >= until:
            del restraint.expected[role]
        else:
            counts[role] = Count(count.ready, max(count.coming, soon - count.ready))
    return Crew(crew.ready, counts)


def _whom(choice: Choice, crew: Crew, restraint: Restraint, now: float) -> WorkerId:
    """The least busy worker of those that may change their role."""
    if choice.giver is None:
        return WorkerId("")
    willing = [each for each in crew.of(choice.giver) if restraint.unwilling.get(each.record.worker_id, now) <= now]
    if not willing:
        return WorkerId("")
    return min(willing, key=lambda each: (each.running + each.waiting, each.record.worker_id)).record.worker_id


def _told(roles: list[RoleLoad], crew: Crew) -> list[RoleCount]:
    if not roles:
        return [
            RoleCount(role=role, now=count.ready, wanted=count.all) for role, count in crew.counts.items() if count.all
        ]
    return [RoleCount(role=each.role, now=each.ready, wanted=each.wanted(), load=each.load) for each in roles]
