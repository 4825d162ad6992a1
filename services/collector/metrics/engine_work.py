"""What each engine has computed lately, and all engines of a model together: input of the disaggregation report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import EngineSpeed, LoadReport, StepTotals
from shared.contracts.workers import Role
from shared.engine_speed.learner import combined, is_valid
from shared.engine_speed.steps import NO_STEPS, Steps

WINDOW_S = 600.0
"""Period that the disaggregation report covers."""
READING_S = 0.5
"""Step totals that are closer together are not read."""
SLOT_S = 5.0
"""Work is kept in sums over so many seconds."""
ENGINES_MAX = 1024
MODELS_MAX = 64


class EngineWork:
    """The work of one engine, in its present epoch."""

    def __init__(self, load: LoadReport, now: float) -> None:
        self.role = load.role
        self.heard = now
        self.model = ""
        """Known from the first request that it served."""
        self.speed: EngineSpeed | None = None
        self._epoch: Epoch = load.epoch
        self._steps = load.steps or StepTotals()
        self._read_at = now
        self._slots: deque[tuple[float, float, Steps]] = deque()
        """When each began, the seconds that it covers, and the work."""

    def reported(self, load: LoadReport, now: float) -> None:
        """A load report has come."""
        self.role, self.heard = load.role, now
        if load.epoch < self._epoch:
            return
        if load.speed is not None and is_valid(load.speed):
            self.speed = load.speed
        if load.steps is None:
            return
        if load.epoch > self._epoch:
            self._epoch, self._steps, self._read_at = load.epoch, load.steps, now
            return
        span_s = now - self._read_at
        if span_s < READING_S:
            return
        done = Steps.between(self._steps, load.steps)
        self._steps, self._read_at = load.steps, now
        if done.is_possible:
            self._keep(done, span_s, now)

    def lately(self, now: float) -> tuple[Steps, float]:
        """The work in the window, and how many seconds of the window were observed."""
        self._forget(now)
        work = sum((work for _at, _span_s, work in self._slots), NO_STEPS)
        return work, sum(span_s for _at, span_s, _work in self._slots)

    def _keep(self, work: Steps, span_s: float, now: float) -> None:
        if self._slots and now - self._slots[-1][0] < SLOT_S:
            at, before_s, before = self._slots.pop()
            self._slots.append((at, before_s + span_s, before + work))
        else:
            self._slots.append((now, span_s, work))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] < now - WINDOW_S:
            self._slots.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWork:
    """All engines of one model: rates are per second of the clock, summed over engines."""

    engines: int
    prefills: int
    """Engines that take prompts."""
    decodes: int
    """Engines that decode; one that does both counts in ``prefills`` as well."""
    work: Steps
    prefill_work: Steps
    """Of the engines in ``prefills``; ``decode_work``: of those in ``decodes``."""
    decode_work: Steps


class Engines:
    """All engines. Bounded."""

    def __init__(self) -> None:
        self._engines: dict[WorkerId, EngineWork] = {}

    def load_reported(self, load: LoadReport, now: float) -> None:
        """A load report has come."""
        engine = self._engines.get(load.worker_id)
        if engine is not None:
            engine.reported(load, now)
            return
        if len(self._engines) >= ENGINES_MAX:
            self._forget_one(now)
        if len(self._engines) < ENGINES_MAX:
            self._engines[load.worker_id] = EngineWork(load, now)

    def served(self, model: str, worker_ids: Iterable[str]) -> None:
        """These workers served a request for that model."""
        for worker_id in worker_ids:
            if engine := self._engines.get(WorkerId(worker_id)):
                engine.model = model

    def speed(self, model: str) -> EngineSpeed | None:
        """One estimate for the engines of a model; None before any has published its own."""
        return combined([one.speed for one in self._engines.values() if one.model == model and one.speed is not None])

    def of(self, model: str, now: float, silent_s_max: float) -> FleetWork:
        """The live engines of a model."""
        heard = [one for one in self._engines.values() if one.model == model and now - one.heard < silent_s_max]
        live = [one for one in heard if one.role is not Role.STORE]
        prefills = [one for one in live if one.role is not Role.DECODE]
        decodes = [one for one in live if one.role is not Role.PREFILL]
        work, prefill_work, decode_work = (_per_s(some, now) for some in (live, prefills, decodes))
        return FleetWork(
            engines=len(live),
            prefills=len(prefills),
            decodes=len(decodes),
            work=work,
            prefill_work=prefill_work,
            decode_work=decode_work,
        )

    def role_of(self, worker_id: str) -> Role | None:
        """As last reported."""
        engine = self._engines.get(WorkerId(worker_id))
        return engine.role if engine is not None else None

    def _forget_one(self, now: float) -> None:
        silent = min(self._engines, key=lambda each: self._engines[each].heard)
        if now - self._engines[silent].heard > WINDOW_S:
            del self._engines[silent]


def _per_s(engines: Iterable[EngineWork], now: float) -> Steps:
    lately = (engine.lately(now) for engine in engines)
    return sum((work.per(seconds) for work, seconds in lately if seconds > 0), NO_STEPS)
