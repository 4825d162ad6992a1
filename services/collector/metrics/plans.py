"""What the planner said last of each family of workers, and what it has changed so far."""

from __future__ import annotations

from collections import Counter

from shared.contracts.planning import PlanAction, PlanDecision

STALE_S_MAX = 60.0
"""A family that nobody has looked at for so long is no longer shown."""
FAMILIES_MAX = 64


class PlanView:
    """Wanted workers and load by model and role; changes since this process began to listen."""

    def __init__(self) -> None:
        self.changes: Counter[tuple[str, str]] = Counter()
        """By action and role."""
        self._looks: dict[tuple[str, str], tuple[PlanDecision, float]] = {}

    def told(self, decision: PlanDecision, now: float) -> None:
        """A decision was made, or its outcome is known."""
        key = (decision.model, decision.fingerprint)
        if key in self._looks or len(self._looks) < FAMILIES_MAX:
            self._looks[key] = (decision, now)
        if decision.action is not PlanAction.NOTHING and not decision.outcome:
            self.changes[decision.action.value, decision.role.value if decision.role else ""] += 1

    def expire(self, now: float) -> None:
        """Forget what is old."""
        self._looks = {key: (told, at) for key, (told, at) in self._looks.items() if now - at < STALE_S_MAX}

    def wanted(self) -> dict[tuple[str, str], int]:
        """Workers by model and role, of all its families."""
        wanted: Counter[tuple[str, str]] = Counter()
        for decision, _at in self._looks.values():
            for each in decision.roles:
                wanted[decision.model, each.role.value] += each.wanted
        return dict(wanted)

    def load(self) -> dict[tuple[str, str], float]:
        """By model and role, of the fullest of its families."""
        load: dict[tuple[str, str], float] = {}
        for decision, _at in self._looks.values():
            for each in decision.roles:
                key = (decision.model, each.role.value)
                load[key] = max(load.get(key, 0.0), each.load)
        return load
