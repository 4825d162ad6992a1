"""What has been so for a while, and not for a moment: the least of a short time, the most of a long one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Some measure of the work, in workers' worth, over the times of ``Rules``."""

    now: float
    """At the last look."""
    lasting: float
    """The least of a short time: so much there surely is."""
    spare: float
    """The most of a longer time; infinite when it has not been looked at for so long."""
    hold: float
    """The most of a long time, likewise."""


Measure = Callable[[Work], float]


class Steadiness:
    """The work of one family at its latest looks."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._looks: deque[tuple[float, Work]] = deque()

    def looked(self, work: Work, now: float) -> None:
        """At ``now`` there was so much."""
        self._looks.append((now, work))
        keep_s = max(self._rules.lasting_s, self._rules.spare_s, self._rules.hold_s)
        # One look from before stays, so that all of the time is covered.
        while len(self._looks) > 1 and self._looks[1][0] <= now - keep_s:
            self._looks.popleft()

    def lost_sight(self) -> None:
        """Nobody knows how much there is now; what was before says nothing of what comes after."""
        self._looks.clear()

    def seen(self, measure: Measure, now: float) -> Seen | None:
        """None when it has not been looked at for long enough to say anything."""
        lasting = self._since(now - self._rules.lasting_s, measure)
        if not lasting:
            return None
        return Seen(
            now=lasting[-1],
            lasting=min(lasting),
            spare=max(self._since(now - self._rules.spare_s, measure), default=math.inf),
            hold=max(self._since(now - self._rules.hold_s, measure), default=math.inf),
        )

    def _since(self, start: float, measure: Measure) -> list[float]:
        """What all looks from ``start`` on saw; none unless there is one from before it."""
        if not self._looks or self._looks[0][0] > start:
            return []
        return [measure(work) for at, work in self._looks if at >= start]
