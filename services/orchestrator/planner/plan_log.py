"""The planner's newest decisions: its changes, and the last decision on each family."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from shared.contracts.planning import PlanAction, PlanDecision

CHANGES_MAX = 200


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
