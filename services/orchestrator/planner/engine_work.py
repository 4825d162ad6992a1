"""What each engine of a family has done lately, what waits for it, and how fast it is, from load reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import EngineSpeed, LoadReport, StepTotals
from shared.engine_speed.learner import combined, is_valid
from shared.engine_speed.steps import NO_STEPS, Steps

READING_S_MIN = 0.5
"""Between two kept readings of one worker."""
SILENT_S_MAX = 5.0
"""A worker that has not reported for so long may be busy: nothing is concluded about its family."""
FORGET_S = 60.0


@dataclass(slots=True)
class EngineWork:
    """Of one life of a worker. ``readings``: its totals at some times, the oldest from just before the window."""

    epoch: Epoch
    heard: float
    waiting: int = 0
    """Requests in the engine's queue."""
    waiting_tokens: int = 0
    reports_steps: bool = False
    speed: EngineSpeed | None = None
    readings: deque[tuple[float, StepTotals]] = field(default_factory=deque)

    def rate(self) -> Steps:
        """Work per second in the window."""
        if len(self.readings) < 2:
            return NO_STEPS
        (first_at, first), (last_at, last) = self.readings[0], self.readings[-1]
        return Steps.between(first, last).per(last_at - first_at)


class FleetWork:
    """Of all workers of a family that report."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._engines: dict[WorkerId, EngineWork] = {}

    def reported(self, load: LoadReport, now: float) -> None:
        """A load report has come."""
        engine = self._engines.get(load.worker_id)
        if engine is None or load.epoch > engine.epoch:
            engine = self._engines[load.worker_id] = EngineWork(load.epoch, now)
        elif load.epoch < engine.epoch:
            return
        engine.heard, engine.waiting, engine.waiting_tokens = now, load.waiting, load.waiting_tokens
        engine.reports_steps = load.steps is not None
        if load.speed is not None and is_valid(load.speed):
            engine.speed = load.speed
        if load.steps is None or (engine.readings and now - engine.readings[-1][0] < READING_S_MIN):
            return
        engine.readings.append((now, load.steps))
        while len(engine.readings) > 2 and engine.readings[1][0] <= now - self._window_s:
            engine.readings.popleft()

    def forget(self, now: float) -> None:
        """Drop workers that have been silent for long."""
        silent = [each for each, engine in self._engines.items() if now - engine.heard >= FORGET_S]
        for each in silent:
            del self._engines[each]

    def unknown(self, worker_ids: Iterable[WorkerId], now: float) -> list[WorkerId]:
        """Workers that are silent or do not report their steps."""
        return [each for each in worker_ids if not _is_known(self._engines.get(each), now)]

    def rate_of(self, worker_ids: Iterable[WorkerId]) -> Steps:
        """Work per second of these engines together."""
        return sum((engine.rate() for engine in self._of(worker_ids)), NO_STEPS)

    def speed(self) -> EngineSpeed | None:
        """One estimate for all engines; None before any has published its own."""
        return combined([engine.speed for engine in self._engines.values() if engine.speed is not None])

    def waiting_tokens(self, worker_ids: Iterable[WorkerId]) -> int:
        """Prompt tokens that these engines have accepted and not yet computed."""
        return sum(engine.waiting_tokens for engine in self._of(worker_ids))

    def waiting(self, worker_ids: Iterable[WorkerId]) -> int:
        """Requests in these engines' queues."""
        return sum(engine.waiting for engine in self._of(worker_ids))

    def _of(self, worker_ids: Iterable[WorkerId]) -> list[EngineWork]:
        return [engine for each in worker_ids if (engine := self._engines.get(each)) is not None]


def _is_known(engine: EngineWork | None, now: float) -> bool:
    return engine is not None and engine.reports_steps and now - engine.heard < SILENT_S_MAX
