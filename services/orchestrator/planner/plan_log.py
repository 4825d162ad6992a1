"""The planner's decisions, the newest of them kept: what it did, and per family what it thinks now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from shared.contracts.planning import PlanAction, PlanDecision

CHANGES_MAX = 200


class PlanLog:
    """The newest changes, and the last look at each family."""

    def __init__(self) -> None:
        self._changes: deque[PlanDecision] = deque(maxlen=CHANGES_MAX)
        self._looks: list[PlanDecision] = []

    def looked(self, decisions: Sequence[PlanDecision]) -> None:
        """These were made at one look at all families."""
        self._changes.extend(each for each in decisions if each.action is not PlanAction.NOTHING)
        self._looks = list(decisions)

    def came_of(self, number: int, outcome: str) -> PlanDecision | None:
        """What came of a change; answers the decision with it, None if it is forgotten."""
        for index, decision in enumerate(self._changes):
            if decision.number == number:
                told = self._changes[index] = msgspec.structs.replace(decision, outcome=outcome)
                return told
        return None

    def newest(self, count_max: int) -> list[PlanDecision]:
        """The newest first, at most so many."""
        # A change that belongs to the last look has its outcome where it is kept.
        every = {decision.number: decision for decision in (*self._looks, *self._changes)}
        return [every[number] for number in sorted(every, reverse=True)[: max(0, count_max)]]
