"""The planner's decisions, the newest of them kept: what it did, and per family what it thinks now."""

from __future__ import annotations

from collections import deque

import msgspec

from shared.contracts.planning import PlanAction, PlanDecision

CHANGES_MAX = 200
FAMILIES_MAX = 64
"""Whose last look is remembered."""


class PlanLog:
    """All changes up to ``CHANGES_MAX``, and the last look at each family."""

    def __init__(self) -> None:
        self._changes: deque[PlanDecision] = deque(maxlen=CHANGES_MAX)
        self._looks: dict[tuple[str, str], PlanDecision] = {}

    def add(self, decision: PlanDecision) -> None:
        """A decision was made."""
        if decision.action is not PlanAction.NOTHING:
            self._changes.append(decision)
        key = (decision.model, decision.fingerprint)
        self._looks.pop(key, None)
        self._looks[key] = decision
        if len(self._looks) > FAMILIES_MAX:
            del self._looks[next(iter(self._looks))]

    def came_of(self, number: int, outcome: str) -> PlanDecision | None:
        """What came of a change; answers the decision with it, None if it is forgotten."""
        for index, decision in enumerate(self._changes):
            if decision.number == number:
                told = self._changes[index] = msgspec.structs.replace(decision, outcome=outcome)
                key = (told.model, told.fingerprint)
                if self._looks.get(key) == decision:
                    self._looks[key] = told
                return told
        return None

    def newest(self, count_max: int) -> list[PlanDecision]:
        """The newest first, at most so many."""
        every = {decision.number: decision for decision in (*self._changes, *self._looks.values())}
        return [every[number] for number in sorted(every, reverse=True)[: max(0, count_max)]]
