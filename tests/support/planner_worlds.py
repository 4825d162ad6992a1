"""A fleet as a fluid, for the planner: prompts flow through prefill workers into batches of decode workers.

Work flows in at a given rate and out at the workers' speed; what does not fit waits, first a little in the engines and
then in the router. Workers take their time to start, to change their role and to leave.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from services.orchestrator.planner.planner import Planner
from services.orchestrator.planner.rules import Rules
from shared.contracts.decisions import TtftParts
from shared.contracts.ids import Epoch, RequestId, WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport, StepTotals
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from shared.engine_speed.learner import SpeedLearner
from tests.support.fleet_builders import record

TOKEN_S, PREFILL_STEP_S, STEP_TOKENS = 1 / 8000, 0.002, 2048
DECODE_STEP_S, DECODE_REQUEST_S = 0.004, 0.0005
ENGINE_QUEUE_S = 2.0
"""Of prompts; what is more waits in the router."""
CHECK_S = 6.0
SWITCH_S, START_S, LEAVE_S = 3.0, 40.0, 5.0
TICK_S = 2.0


@dataclass(frozen=True)
class Traffic:
    """What comes at an instant."""

    requests_per_s: float
    prompt_tokens: float = 2000.0
    completion_tokens: float = 200.0


Curve = Callable[[float], Traffic]


@dataclass
class SimWorker:
    name: str
    role: Role
    phase: WorkerPhase = WorkerPhase.READY
    changes_at: float = math.inf
    becomes: WorkerPhase | Role | None = None
    seconds: float = 0.0
    prefill_steps: float = 0.0
    prefill_tokens: float = 0.0
    decode_steps: float = 0.0
    decode_requests: float = 0.0
    batch: float = 0.0
    reports: bool = True
    learner: SpeedLearner = field(default_factory=SpeedLearner)

    def steps(self) -> StepTotals:
        return StepTotals(
            seconds=self.seconds,
            prefill_steps=int(self.prefill_steps),
            prefill_tokens=int(self.prefill_tokens),
            decode_steps=int(self.decode_steps),
            decode_requests=int(self.decode_requests),
            decode_context_tokens=int(self.decode_requests * 2100),
        )


@dataclass
class PlannerWorld:
    """One model's fleet, its traffic and its planner."""

    rules: Rules
    curve: Curve
    prefill: int = 1
    decode: int = 1
    both: int = 0
    noise: float = 0.0
    scaler: Callable[[PlanDecision], int] | None = None
    """How many of the asked-for workers there are; None: all of them."""
    seed: int = 1
    now: float = 0.0
    workers: list[SimWorker] = field(default_factory=list)
    queued_tokens: float = 0.0
    streams: float = 0.0
    finished: float = 0.0
    changes: list[tuple[float, PlanDecision]] = field(default_factory=list)
    last: PlanDecision | None = None
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Instants, and the wait for the first token that a request would have which comes then."""
    itls: list[tuple[float, float]] = field(default_factory=list)
    """Instants, and the longest time between tokens of a decode worker."""

    def __post_init__(self) -> None:
        roles = [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode + [Role.BOTH] * self.both
        self.workers = [SimWorker(f"w{n}", role) for n, role in enumerate(roles)]
        self.planner = Planner(self.rules, self.now)
        self.random = random.Random(self.seed)
        self.next_plan = 0.0

    def run(self, seconds: float) -> PlannerWorld:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self._settle()
            self._flow()
            self._report()
            if self.now >= self.next_plan:
                self.next_plan = self.now + CHECK_S
                self._plan()
            self.sizes.append((self.now, self.count(Role.PREFILL), self.count(Role.DECODE)))
        return self

    def count(self, role: Role) -> int:
        return sum(each.role is role and each.phase is WorkerPhase.READY for each in self.workers)

    def switches(self) -> list[tuple[float, Role | None]]:
        return [(at, each.role) for at, each in self.changes if each.action is PlanAction.CHANGE_ROLE]

    def scalings(self) -> list[tuple[float, Role | None, int]]:
        return [(at, each.role, each.change) for at, each in self.changes if each.action is PlanAction.SCALE]

    def reversals(self, role: Role) -> int:
        """How often a role that had been growing began to shrink, or the other way round."""
        ways = []
        for _at, each in self.changes:
            if each.action is PlanAction.CHANGE_ROLE:
                ways.append(1 if each.role is role else -1)
            elif each.role is role:
                ways.append(1 if each.change > 0 else -1)
        return sum(one != two for one, two in itertools.pairwise(ways))

    def _ready(self, *roles: Role) -> list[SimWorker]:
        return [each for each in self.workers if each.role in roles and each.phase is WorkerPhase.READY]

    def _settle(self) -> None:
        for worker in list(self.workers):
            if self.now < worker.changes_at:
                continue
            worker.changes_at = math.inf
            if isinstance(worker.becomes, Role):
                worker.role = worker.becomes
            elif worker.becomes is WorkerPhase.GONE:
                self.workers.remove(worker)
            elif worker.becomes is not None:
                worker.phase = worker.becomes

    def _flow(self) -> None:
        traffic = self.curve(self.now)
        rate = traffic.requests_per_s * max(0.0, self.random.gauss(1.0, self.noise))
        self.queued_tokens += rate * TICK_S * traffic.prompt_tokens
        prefilling = self._ready(Role.PREFILL, Role.BOTH)
        token_s = TOKEN_S + PREFILL_STEP_S / STEP_TOKENS
        self.waits.append((self.now, self.queued_tokens * token_s / max(1, len(prefilling))))
        each = min(self.queued_tokens / max(1, len(prefilling)), TICK_S / token_s)
        for worker in prefilling:
            worker.prefill_tokens += each
            worker.prefill_steps += each / STEP_TOKENS
            worker.seconds += each * token_s
            self.queued_tokens -= each
            self.streams += each / traffic.prompt_tokens
        decoding = self._ready(Role.DECODE, Role.BOTH)
        ended = longest_s = 0.0
        for worker in decoding:
            batch = self.streams / len(decoding)
            step_s = DECODE_STEP_S + batch * DECODE_REQUEST_S
            longest_s = max(longest_s, step_s)
            busy = min(TICK_S, max(batch * traffic.completion_tokens * step_s / max(batch, 1.0), 0.0))
            worker.batch = batch
            worker.decode_steps += busy / step_s
            worker.decode_requests += batch * busy / step_s
            worker.seconds += busy
            ended += batch * busy / step_s / traffic.completion_tokens
        self.itls.append((self.now, longest_s))
        self.streams = max(0.0, self.streams - ended)
        self.finished += ended
        self._finish(traffic, token_s, len(prefilling))

    def _finish(self, traffic: Traffic, token_s: float, prefilling: int) -> None:
        wait_s = self.queued_tokens * token_s / max(1, prefilling)
        while self.finished >= 1.0:
            self.finished -= 1.0
            self.planner.ended(
                RequestFinished(
                    request_id=RequestId("r"),
                    model="m",
                    path="/v1/completions",
                    mode="disaggregated",
                    status=200,
                    prefill_worker=self.workers[0].name,
                    decode_worker=self.workers[0].name,
                    prompt_tokens=int(traffic.prompt_tokens),
                    completion_tokens=int(traffic.completion_tokens),
                    cached_tokens=0,
                    ttft_s=wait_s + traffic.prompt_tokens * token_s,
                    itl_s=0.01,
                    ttft_parts=TtftParts(
                        admission_s=max(0.0, wait_s - ENGINE_QUEUE_S), queue_s=min(wait_s, ENGINE_QUEUE_S)
                    ),
                ),
                self.now,
            )

    def _report(self) -> None:
        prefilling = len(self._ready(Role.PREFILL, Role.BOTH))
        in_engines = min(self.queued_tokens / max(1, prefilling), ENGINE_QUEUE_S / TOKEN_S)
        for worker in self.workers:
            if worker.phase is not WorkerPhase.READY or not worker.reports:
                continue
            computes = worker.role is not Role.DECODE
            steps = worker.steps()
            worker.learner.observe(steps)
            self.planner.reported(
                LoadReport(
                    worker_id=WorkerId(worker.name),
                    epoch=Epoch(1),
                    role=worker.role,
                    phase=worker.phase,
                    running=int(worker.batch),
                    waiting_tokens=int(in_engines) if computes else 0,
                    steps=steps,
                    speed=worker.learner.speed,
                ),
                self.now,
            )

    def fleet(self) -> list[FleetWorker]:
        made = []
        for worker in self.workers:
            written = msgspec.structs.replace(
                record(worker.name, worker.phase, 1, worker.role), kv_tokens=640_000, legs_max=256
            )
            made.append(
                FleetWorker(
                    record=written, phase=worker.phase, since_s=1.0, silent_s=0.0, running=int(worker.batch), waiting=0
                )
            )
        return made

    def _plan(self) -> None:
        for decision in self.planner.plan(self.fleet(), self.now, round(self.now * 1000)):
            self.last = decision
            if decision.action is not PlanAction.NOTHING:
                self.changes.append((self.now, decision))
                self._carry_out(decision)

    def _carry_out(self, decision: PlanDecision) -> None:
        if decision.action is PlanAction.CHANGE_ROLE:
            worker = next(each for each in self.workers if each.name == decision.worker_id)
            worker.becomes, worker.changes_at = decision.role, self.now + SWITCH_S
            self.planner.set_outcome(decision, done=True, outcome="done", now=self.now + SWITCH_S)
            return
        change = decision.change if self.scaler is None else self.scaler(decision)
        if decision.role is not None:
            self._scale(decision.role, change)
        self.planner.set_outcome(decision, done=change != 0, outcome=f"{change} workers", now=self.now)

    def _scale(self, role: Role, change: int) -> None:
        for _each in range(change):
            self.workers.append(
                SimWorker(
                    f"n{len(self.changes)}-{len(self.workers)}",
                    role,
                    WorkerPhase.STARTING,
                    self.now + START_S,
                    WorkerPhase.READY,
                )
            )
        for worker in self._ready(role)[change:] if change < 0 else []:
            worker.phase, worker.becomes, worker.changes_at = WorkerPhase.DRAINING, WorkerPhase.GONE, self.now + LEAVE_S


def steady(rate: float, **more: float) -> Curve:
    return lambda _at: Traffic(rate, **more)
