"""What each engine has computed lately, and all engines of a model together: what a verdict is estimated from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.collector.report.step_time import StepLaw
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LoadReport, StepTotals
from shared.contracts.workers import Role
from shared.engine_speed import NO_STEPS, Steps, StepTimeModel

WINDOW_S = 600.0
"""What a verdict looks back on."""
EQUATION_S = 0.5
"""Reports that are closer together are one equation."""
SLOT_S = 5.0
"""Work is kept in sums over so many seconds."""
ENGINES_MAX = 1024
MODELS_MAX = 64


class EngineWork:
    """One engine's, in this life of it."""

    def __init__(self, load: LoadReport, now: float) -> None:
        self.role = load.role
        self.heard = now
        self.model = ""
        """Known from the first request that it served."""
        self._epoch: Epoch = load.epoch
        self._steps = load.steps or StepTotals()
        self._told_at = now
        self._slots: deque[tuple[float, float, Steps]] = deque()
        """When each began, the seconds that it covers, and the work."""

    def told(self, load: LoadReport, now: float) -> Steps | None:
        """A report. Answers an equation of the engine's law, now and then."""
        self.role, self.heard = load.role, now
        if load.steps is None or load.epoch < self._epoch:
            return None
        if load.epoch > self._epoch:
            self._epoch, self._steps, self._told_at = load.epoch, load.steps, now
            return None
        span_s = now - self._told_at
        if span_s < EQUATION_S:
            return None
        done = Steps.between(self._steps, load.steps)
        self._steps, self._told_at = load.steps, now
        if not done.is_possible:
            return None
        self._keep(done, span_s, now)
        return done if done.seconds > 0 else None

    def lately(self, now: float) -> tuple[Steps, float]:
        """The work of the window, and how many seconds of it were watched."""
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
    """Of them, those that prompts are placed on; likewise ``decodes``."""
    decodes: int
    work: Steps
    prefill_work: Steps
    """Of those that only compute prompts, or do both; likewise ``decode_work``."""
    decode_work: Steps


class Engines:
    """All of them, and the law of each model's. Bounded."""

    def __init__(self) -> None:
        self._engines: dict[WorkerId, EngineWork] = {}
        self._laws: dict[str, StepLaw] = {}

    def load_reported(self, load: LoadReport, now: float) -> None:
        """A worker says what its engine has done."""
        engine = self._engines.get(load.worker_id)
        if engine is None:
            if len(self._engines) >= ENGINES_MAX:
                self._forget_one(now)
            if len(self._engines) < ENGINES_MAX:
                self._engines[load.worker_id] = EngineWork(load, now)
            return
        equation = engine.told(load, now)
        if equation is not None and engine.model:
            if len(self._laws) >= MODELS_MAX and engine.model not in self._laws:
                return
            self._laws.setdefault(engine.model, StepLaw()).add(equation, now)

    def served(self, model: str, worker_ids: Iterable[str]) -> None:
        """These workers took part in a request for that model."""
        for worker_id in worker_ids:
            if engine := self._engines.get(WorkerId(worker_id)):
                engine.model = model

    def laws(self, model: str) -> tuple[StepTimeModel, ...]:
        """See ``StepLaw.laws``."""
        law = self._laws.get(model)
        return law.laws() if law is not None else ()

    def of(self, model: str, now: float, silent_s_max: float) -> FleetWork:
        """Those of a model that live."""
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
        """As it said last."""
        engine = self._engines.get(WorkerId(worker_id))
        return engine.role if engine is not None else None

    def _forget_one(self, now: float) -> None:
        silent = min(self._engines, key=lambda each: self._engines[each].heard)
        if now - self._engines[silent].heard > WINDOW_S:
            del self._engines[silent]


def _per_s(engines: Iterable[EngineWork], now: float) -> Steps:
    lately = (engine.lately(now) for engine in engines)
    return sum((work.per(seconds) for work, seconds in lately if seconds > 0), NO_STEPS)
