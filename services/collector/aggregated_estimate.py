"""What the engines have computed lately, and an estimate of aggregated serving: the same requests on the same engines,
each engine computing both phases.

Each engine would compute its share of all prompts, and each of its steps would carry its share of all completions:

* Between two tokens of a completion lies a step, and the prompts in between. If prompts take the part ``u`` of an
  engine's time, a step of ``d`` seconds comes every ``d / (1 - u)``.
* A prompt chunk shares its step with the running completions, so it takes that much longer.
* More engines take prompts, but each computes them more slowly: the queue follows the Pollaczek-Khinchine formula.
* There is no handoff and no second queue.

The estimate is the measurement times the ratio of two predictions of this model, for aggregated serving and for the
present fleet. Effects outside the model (network, context length, quality of placement) therefore cancel out.

Where batches have hardly varied, the cost of a decode step cannot be separated from the cost of each request in it:
``batch_spread`` is large. Then two models bound what larger batches may cost. Both agree on the observed batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shared.contracts.decisions import TtftParts
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import EngineSpeed, LoadReport, StepTotals
from shared.contracts.workers import Role
from shared.engine_speed.learner import combined, is_measured, is_valid
from shared.engine_speed.steps import NO_STEPS, Steps, StepTimeModel

IDLE_MIN = 0.05
"""Share of an engine's time that must be idle; with less, the queue grows without bound."""
SAMPLES_MIN = 20.0
DEVIATIONS = 2.0
"""The bounds are so many standard deviations from the estimate."""
OPEN_MIN = 0.15
"""Bounds of a decode step's variable part that differ by less, as a share of the step, count as one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request that was served disaggregated, as its router measured it."""

    ttft_s: float
    itl_s: float
    e2e_s: float
    completion_tokens: int
    computed_tokens: int
    """Prompt tokens that were computed."""
    parts: TtftParts

    def with_itl(self, ttft_s: float, itl_s: float) -> float:
        """E2E latency of the request with another TTFT and ITL."""
        between = max(0, self.completion_tokens - 1)
        return self.e2e_s + (ttft_s - self.ttft_s) + between * (itl_s - self.itl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Latencies of one request, in seconds."""

    ttft_s: float
    itl_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """Estimate of the fleet when all of its engines serve requests aggregated."""

    itl_ratio: float
    """Predicted ITL over the present ITL."""
    itl_now_s: float
    """The model's prediction of the present ITL; callers compare it with the measurement."""
    shared_s: float
    """Time that completions add to a step with a prompt chunk."""
    queue_ratio: float
    """Growth of the queue at unchanged prefill time; ``busy`` and ``busy_now`` account for the rest."""
    busy: float
    """Share of each engine's time that prompts would take; ``busy_now``: their share on today's prefill engines."""
    busy_now: float
    step_tokens: int

    def of(self, sample: Sample) -> Latencies | None:
        """Predicted latencies of that request; None: the prompt queue would grow without bound."""
        parts = sample.parts
        prefill_s = parts.prefill_s + math.ceil(sample.computed_tokens / self.step_tokens) * self.shared_s
        slower = prefill_s / parts.prefill_s if parts.prefill_s > 0 else 1.0
        idle, idle_now = 1.0 - self.busy * slower, 1.0 - self.busy_now
        if idle < IDLE_MIN:
            return None
        queue_s = parts.queue_s * self.queue_ratio * slower**2 * max(idle_now, IDLE_MIN) / idle + self.shared_s / 2
        replaced_s = parts.queue_s + parts.prefill_s + parts.handoff_s + parts.decode_queue_s + parts.decode_prefill_s
        ttft_s = max(0.0, sample.ttft_s - replaced_s) + queue_s + prefill_s
        itl_s = sample.itl_s * self.itl_ratio
        return Latencies(ttft_s=ttft_s, itl_s=itl_s, e2e_s=sample.with_itl(ttft_s, itl_s))


def aggregated(work: FleetWork, model: StepTimeModel, step_tokens: int) -> Aggregated | None:
    """``work`` must have prefill and decode engines. None: aggregated engines could not carry the load."""
    busy = model.prefill_s(work.work) / work.engines
    tokens_per_s = work.work.decode_requests
    per_engine = tokens_per_s / work.engines
    step_s = model.decode_step_s + model.decode_request_s
    idle = 1.0 - busy - model.decode_request_s * per_engine
    if idle < IDLE_MIN:
        return None
    idle_now = 1.0 - model.prefill_s(work.decode_work) / work.decodes
    idle_now -= model.decode_request_s * tokens_per_s / work.decodes
    itl_s, itl_now_s = step_s / idle, step_s / max(idle_now, IDLE_MIN)
    batch = per_engine * itl_s
    return Aggregated(
        itl_ratio=itl_s / itl_now_s if itl_now_s > 0 else 1.0,
        itl_now_s=itl_now_s,
        shared_s=model.decode_step_s * (1.0 - math.exp(-batch)) + model.decode_request_s * batch,
        queue_ratio=work.prefills / work.engines,
        busy=busy,
        busy_now=model.prefill_s(work.prefill_work) / work.prefills,
        step_tokens=max(1, step_tokens),
    )


def step_time_models(speed: EngineSpeed | None, work: Steps) -> tuple[StepTimeModel, ...]:
    """None while too little is measured, one, or two bounds. ``work``: of all engines.

    The cost of context is part of the cost of a request, at the mean context of ``work``.
    """
    if speed is None or speed.prefill_samples + speed.decode_samples < SAMPLES_MIN or not is_measured(speed)[1]:
        return ()
    times = StepTimeModel.of(speed)
    if not work.decode_steps or not work.decode_requests:
        return (times,)
    batch, context = work.decode_requests / work.decode_steps, work.decode_context_tokens / work.decode_requests
    request_s = times.decode_request_s + context * times.decode_context_token_s
    step_s = times.decode_step_of(batch, context)
    factor = math.exp(DEVIATIONS * speed.batch_spread)
    low, high = request_s / factor, min(request_s * factor, step_s / batch)
    if (high - low) * batch < OPEN_MIN * step_s:
        return (_with(times, step_s - batch * request_s, request_s),)
    return _with(times, step_s - batch * low, low), _with(times, max(0.0, step_s - batch * high), high)


def _with(times: StepTimeModel, decode_step_s: float, decode_request_s: float) -> StepTimeModel:
    return times._replace(decode_step_s=decode_step_s, decode_request_s=decode_request_s, decode_context_token_s=0.0)


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
    """Work of the engines in ``prefills``; ``decode_work``: of those in ``decodes``."""
    decode_work: Steps


class Engines:
    """All engines. Bounded."""

    def __init__(self) -> None:
        self._engines: dict[WorkerId, EngineWork] = {}

    def load_reported(self, load: LoadReport, now: float) -> None:
        engine = self._engines.get(load.worker_id)
        if engine is not None:
            engine.reported(load, now)
            return
        if len(self._engines) >= ENGINES_MAX:
            self._forget_one(now)
        if len(self._engines) < ENGINES_MAX:
            self._engines[load.worker_id] = EngineWork(load, now)

    def served(self, model: str, worker_ids: Iterable[str]) -> None:
        for worker_id in worker_ids:
            if engine := self._engines.get(WorkerId(worker_id)):
                engine.model = model

    def speed(self, model: str) -> EngineSpeed | None:
        """One estimate for the engines of a model; None before any has published its own."""
        return combined([one.speed for one in self._engines.values() if one.model == model and one.speed is not None])

    def of(self, model: str, now: float, silent_s_max: float) -> FleetWork:
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
