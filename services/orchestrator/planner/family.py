"""State of one family: the workers of one model and fingerprint, which are interchangeable.

``EngineWork`` keeps, from load reports, what each engine has done lately, what waits for it, and how fast it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.orchestrator.planner.change import RoleLoad
from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.work import Engines, Queues, RequestWindow, Steadiness, Work, work_of
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import EngineSpeed, LoadReport, StepTotals
from shared.contracts.planning import Demand
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from shared.engine_speed.learner import combined, is_measured, is_valid
from shared.engine_speed.steps import DEFAULT_STEP_TIMES, NO_STEPS, Steps, StepTimeModel

READING_S_MIN = 0.5
"""Shortest time between two kept readings of one worker."""
SILENT_S_MAX = 5.0
"""A worker that has not reported for so long may be busy: nothing is concluded about its family."""
FORGET_S = 60.0


@dataclass(slots=True)
class EngineWork:
    """Work in one life of a worker. ``readings``: its totals at some times, the oldest from just before the window."""

    epoch: Epoch
    heard: float
    running: int = 0
    waiting: int = 0
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
    """Work of all workers of a family that report."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._engines: dict[WorkerId, EngineWork] = {}

    def reported(self, load: LoadReport, now: float) -> None:
        engine = self._engines.get(load.worker_id)
        if engine is None or load.epoch > engine.epoch:
            engine = self._engines[load.worker_id] = EngineWork(load.epoch, now)
        elif load.epoch < engine.epoch:
            return
        engine.heard, engine.running = now, load.running
        engine.waiting, engine.waiting_tokens = load.waiting, load.waiting_tokens
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

    def running(self, worker_ids: Iterable[WorkerId]) -> int:
        """Requests in these engines' batches."""
        return sum(engine.running for engine in self._of(worker_ids))

    def _of(self, worker_ids: Iterable[WorkerId]) -> list[EngineWork]:
        return [engine for each in worker_ids if (engine := self._engines.get(each)) is not None]


def _is_known(engine: EngineWork | None, now: float) -> bool:
    return engine is not None and engine.reports_steps and now - engine.heard < SILENT_S_MAX


COMING = (WorkerPhase.STARTING, WorkerPhase.PROBING)
PLANNED = (Role.PREFILL, Role.DECODE, Role.BOTH)
"""The roles that compute."""
Key = tuple[str, str]
"""Model and fingerprint."""


def by_family(workers: Iterable[FleetWorker]) -> dict[Key, list[FleetWorker]]:
    """The computing workers that the planner may start, drain and change: not those attached to servers outside of
    Baton. A starting worker may not know its fingerprint yet: it counts in a family that serves its model, in its
    revision if a family has that.
    """
    families: dict[Key, list[FleetWorker]] = {}
    coming = []
    for worker in workers:
        planned = worker.record.role in PLANNED and not worker.record.attached
        if planned and worker.record.models and worker.phase is not WorkerPhase.ASLEEP:
            if worker.phase in COMING:
                coming.append(worker)
            else:
                families.setdefault(_key(worker), []).append(worker)
    for worker in coming:
        key = _key(worker)
        served = [each for each in families if each[0] == key[0]]
        if key not in families and served:
            revision = worker.record.fingerprint.revision
            alike = [each for each in served if revision_of(each, families[each]) == revision]
            key = max(alike or served, key=lambda each: len(families[each]))
        families.setdefault(key, []).append(worker)
    return families


def revision_of(key: Key, family: Iterable[FleetWorker]) -> str:
    """Revision of the workers with this fingerprint; a starting worker that counts may turn out to have another."""
    return next(each.record.fingerprint.revision for each in family if _key(each) == key)


def names_of(family: Iterable[FleetWorker]) -> frozenset[str]:
    """Names of its model and of the LoRA adapters that its workers have loaded."""
    return frozenset(
        name for each in family for name in (*each.record.models, *(one.name for one in each.record.adapters))
    )


def _key(worker: FleetWorker) -> Key:
    return worker.record.model, worker.record.fingerprint.key()


@dataclass(frozen=True, slots=True)
class Count:
    ready: int = 0
    coming: int = 0

    @property
    def all(self) -> int:
        return self.ready + self.coming


@dataclass(frozen=True, slots=True)
class FamilyWorkers:
    """The workers of a family in one sample, by role."""

    ready: Sequence[FleetWorker]
    counts: Mapping[Role, Count]

    @property
    def ids(self) -> list[WorkerId]:
        return [each.record.worker_id for each in self.ready]

    def of(self, *roles: Role) -> list[FleetWorker]:
        """The ready workers of these roles."""
        return [each for each in self.ready if each.record.role in roles]


def workers_of(workers: Sequence[FleetWorker], start_s_max: float) -> FamilyWorkers:
    """The ready workers, and those that are starting."""
    ready = [each for each in workers if each.phase is WorkerPhase.READY and each.record.role in PLANNED]
    coming = [each.record.role for each in workers if each.phase in COMING and each.since_s < start_s_max]
    roles = [each.record.role for each in ready]
    return FamilyWorkers(ready, {role: Count(roles.count(role), coming.count(role)) for role in PLANNED})


@dataclass(slots=True)
class Family:
    """Speed, work and demand of one family, from its reports."""

    rules: Rules
    since: float
    revision: str
    """Revision of the workers' model, for the scaler."""
    speed: EngineSpeed | None = None
    """Last known speed, which outlives the workers that published it."""
    engines: FleetWork = field(init=False)
    requests: RequestWindow = field(init=False)
    steadiness: Steadiness = field(init=False)

    def __post_init__(self) -> None:
        self.engines = FleetWork(self.rules.window_s)
        self.requests = RequestWindow(self.rules.window_s, self.since)
        self.steadiness = Steadiness(self.rules)

    def reported(self, load: LoadReport, now: float) -> None:
        """One of its workers has reported."""
        self.engines.reported(load, now)
        if load.speed is not None:
            self.speed = self.engines.speed() or self.speed

    def ended(self, request: RequestFinished, now: float) -> None:
        self.requests.ended(request, now)

    def unknown(self, workers: FamilyWorkers, now: float) -> str:
        """Why the family's work is unknown, as text; empty when it is known."""
        if not workers.ready:
            return "no worker is ready"
        if silent := self.engines.unknown(workers.ids, now):
            return f"{', '.join(silent)} does not report its steps"
        if self.speed is None:
            return "no engine has worked yet: its speed is not known"
        return ""

    def sample(self, workers: FamilyWorkers, now: float) -> tuple[Work, Demand]:
        """Take a sample of the family's work, which must be known."""
        self.engines.forget(now)
        assert self.speed is not None
        observed = self.requests.observed(now)
        records = [each.record for each in workers.ready]
        engines = Engines(
            kv_tokens=min(one.kv_tokens for one in records),
            requests_max=min(one.legs_max for one in records),
            prefill=len(workers.of(Role.PREFILL, Role.BOTH)),
            decode=len(workers.of(Role.DECODE, Role.BOTH)),
        )
        only_decode = [each.record.worker_id for each in workers.of(Role.DECODE)]
        decoding = [each.record.worker_id for each in workers.of(Role.DECODE, Role.BOTH)]
        queues = Queues(
            prompt_tokens=self.engines.waiting_tokens(workers.ids),
            requests=self.engines.waiting(only_decode),
            decoding=self.engines.running(decoding),
        )
        work = work_of(self.engines.rate_of(workers.ids), queues, observed, step_times(self.speed), engines, self.rules)
        self.steadiness.add(work, now)
        return work, observed.demand

    def roles(self, workers: FamilyWorkers, work: Work, now: float) -> list[RoleLoad]:
        """The work of each role, now and before; none before ``lasting_s`` was observed."""
        observed = self.steadiness.observed
        whole = observed(lambda each: each.prefill + each.decode, lambda each: each.decode_waiting, now)
        prefill = observed(lambda each: each.prefill, lambda each: each.prefill_waiting, now)
        decode = observed(lambda each: each.decode, lambda each: each.decode_waiting, now)
        if whole is None or prefill is None or decode is None:
            return []
        prefills, decodes, both = (workers.counts[role] for role in (Role.PREFILL, Role.DECODE, Role.BOTH))
        if both.all and not prefills.all + decodes.all:
            cause = f"{work.prefill_cause}; {work.decode_cause}"
            return [RoleLoad(Role.BOTH, both.ready, both.coming, 0.0, whole, work.prefill_load_max, 1, cause)]
        helped = _help_to_prefill(both.ready, prefills.ready, decodes.ready, work)
        rest, rules = both.ready - helped, self.rules
        prefill_min, decode_min = (0, 0) if both.ready else (rules.prefill_min, rules.decode_min)
        return [
            RoleLoad(
                Role.PREFILL,
                prefills.ready,
                prefills.coming,
                helped,
                prefill,
                work.prefill_load_max,
                prefill_min,
                work.prefill_cause,
            ),
            RoleLoad(
                Role.DECODE,
                decodes.ready,
                decodes.coming,
                rest,
                decode,
                work.decode_load_max,
                decode_min,
                work.decode_cause,
            ),
        ]


def _help_to_prefill(both: int, prefills: int, decodes: int, work: Work) -> float:
    """How many of the workers with both roles do prefill, so that all workers are as equally full as possible."""
    whole = work.prefill + work.decode
    share = work.prefill / whole if whole else 0.5
    return min(max((both + prefills + decodes) * share - prefills, 0.0), float(both))


def step_times(speed: EngineSpeed) -> StepTimeModel:
    """The family's step times. A phase that was never measured is as much slower than the default as the other."""
    times = StepTimeModel.of(speed)
    prefill, decode = is_measured(speed)
    if prefill and not decode:
        factor = times.prefill_token_s / DEFAULT_STEP_TIMES.prefill_token_s
        return StepTimeModel(*[*times[:3], *(factor * one for one in DEFAULT_STEP_TIMES[3:])])
    if decode and not prefill:
        factor = times.decode_step_s / DEFAULT_STEP_TIMES.decode_step_s
        return StepTimeModel(*[*(factor * one for one in DEFAULT_STEP_TIMES[:3]), *times[3:]])
    return times
