"""How a worker leaves: it takes no new legs, and its running ones get a while to finish."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.failures import Failure, Reason


@dataclass(frozen=True, slots=True)
class Draining:
    """Began at ``since``; legs get ``s_max`` seconds."""

    since: float
    s_max: float

    def left_s(self, now: float) -> float:
        """Seconds that legs still have; never negative."""
        return max(0.0, self.since + self.s_max - now)

    def verdict(self) -> Failure:
        """What a leg is told that did not finish in time."""
        message = f"the worker stopped; the leg had {self.s_max:g} s to finish and did not"
        return Failure(reason=Reason.WORKER_DRAINING, message=message)
