"""How a worker leaves: it takes no new legs, and its running ones get a while to finish."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import DrainWorker

DEADLINE_S_MAX = 86_400.0
"""That an order may give running legs."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Why and how the worker leaves."""

    s_max: float
    """For running legs."""
    evacuate: bool = False
    ordered: bool = False
    """Somebody told this worker to go; otherwise its process was told to end, as all of them are when a system stops,
    and nobody stays who could take its cache."""


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


def ordered(order: DrainWorker, s_max: float) -> Departure:
    """What the order means; ``s_max`` is the worker's own deadline."""
    asked = s_max if order.deadline_s is None else order.deadline_s
    return Departure(s_max=min(max(0.0, asked), DEADLINE_S_MAX), evacuate=order.evacuate, ordered=True)


def hurried(draining: Draining, now: float, s_max: float) -> Draining:
    """The process was told to end while it drained: legs get no more than they would have got for that alone."""
    return draining if draining.left_s(now) <= s_max else Draining(now, s_max)
