"""The minimum of the work over a short time and its maximum over long ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Work in workers' worth, over the times of ``Rules``."""

    now: float
    """In the last sample."""
    lasting: float
    """The minimum over ``lasting_s``."""
    spare: float
    """The maximum over ``spare_s``; infinite before it was observed for so long."""
    hold: float
    """The maximum over ``hold_s``, likewise."""


Measure = Callable[[Work], float]


class Steadiness:
    """The latest samples of one family's work."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._samples: deque[tuple[float, Work]] = deque()

    def add(self, work: Work, now: float) -> None:
        """One sample."""
        self._samples.append((now, work))
        keep_s = max(self._rules.lasting_s, self._rules.spare_s, self._rules.hold_s)
        # One older sample stays, so that all of the time is covered.
        while len(self._samples) > 1 and self._samples[1][0] <= now - keep_s:
            self._samples.popleft()

    def clear(self) -> None:
        """The work is unknown for a while: earlier samples no longer count."""
        self._samples.clear()

    def observed(self, measure: Measure, now: float) -> Observed | None:
        """None before ``lasting_s`` was observed."""
        lasting = self._since(now - self._rules.lasting_s, measure)
        if not lasting:
            return None
        return Observed(
            now=lasting[-1],
            lasting=min(lasting),
            spare=max(self._since(now - self._rules.spare_s, measure), default=math.inf),
            hold=max(self._since(now - self._rules.hold_s, measure), default=math.inf),
        )

    def _since(self, start: float, measure: Measure) -> list[float]:
        """All samples from ``start`` on; none unless there is an older one."""
        if not self._samples or self._samples[0][0] > start:
            return []
        return [measure(work) for at, work in self._samples if at >= start]
