"""A replayed fleet that the planner changes: the router's core, the planner's and the engines, all in virtual time.

The planner receives load reports, finished and rejected requests, and the registry. Its decisions take
time: workers start with cold caches, change roles, and drain before they leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from bench.study.results import Slo
from replay.legs import Leg, ReplayedRequest
from replay.profile import Profile
from replay.router import NETWORK_S
from replay.simworker import MODEL, PERIOD_S, SimWorker
from replay.split import Split
from replay.traces import Request
from replay.world import World
from services.orchestrator.planner.planner import Planner
from services.orchestrator.planner.rules import Rules
from services.router.placement.placement import Placement, Rejection
from services.router.placement.slo import Targets
from shared.contracts.decisions import TtftParts
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.inference import LegKind, RequestFinished
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import FleetWorker, Role, WorkerPhase

TICK_S = 1.0
PLAN_TICKS = 5
"""Planning interval: the default five seconds."""


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Durations of changes of the fleet."""

    start_s: float = 90.0
    """From requesting a worker until it is ready: process, weights, graphs, self-test."""
    switch_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """The fleet at an instant: ready workers by role, and all running ones."""

    at: float
    prefill: int
    decode: int
    all: int


class PlannedWorld(World):
    """``rules``: of the planner; without, the fleet stays as it is."""

    def __init__(
        self, split: Split, profile: Profile, slo: Slo, rules: Rules | None = None, delays: Delays | None = None
    ) -> None:
        super().__init__(split, profile)
        self.targets = Targets(ttft_s=slo.ttft_s, itl_s=slo.itl_s)
        self.planner = None if rules is None else Planner(rules, 0.0)
        self.decisions: list[PlanDecision] = []
        """Of every planning interval."""
        self.sizes: list[Size] = []
        self.left: list[SimWorker] = []
        self._delays = delays or Delays()
        self._coming: list[SimWorker] = []
        self._since: dict[WorkerId, float] = {}
        """When workers that came later came to their phase."""
        self._numbers_of_workers = count(len(self.workers))
        self._expected: Counter[WorkerId] = Counter()
        """Legs that run or will run there."""
        self._parts: dict[int, TtftParts] = {}
        self._until = 0.0

    @property
    def changes(self) -> list[tuple[float, PlanDecision]]:
        """What was changed, and when."""
        return [(each.at_ms / 1000, each) for each in self.decisions if each.action is not PlanAction.NOTHING]

    def run(
        self, requests: list[Request], progress: Callable[[int], None] = lambda _number: None
    ) -> list[ReplayedRequest]:
        """Replay all requests; the planner runs until the last arrival."""
        self._until = requests[-1].at_s
        self.at(0.0, self._tick, 0)
        return super().run(requests, progress)

    # Events of the router, which the planner hears of, too.

    def _decided(self, now: float, replayed: ReplayedRequest, placement: Placement | Rejection) -> None:
        super()._decided(now, replayed, placement)
        if isinstance(placement, Rejection):
            self._ended_request(now, _turned_away(replayed))
            return
        views = [placement.decode] if placement.prefill is None else [placement.prefill, placement.decode]
        self._expected.update(view.record.worker_id for view in views)

    def _prompt_computed(self, now: float, leg: Leg) -> None:
        super()._prompt_computed(now, leg)
        if leg.kind is not LegKind.DECODE:
            began_s = leg.job.scheduled_at if leg.job.scheduled_at is not None else now
            self._parts[leg.replayed.number] = TtftParts(
                admission_s=leg.sent.at - leg.replayed.request.at_s, queue_s=max(0.0, began_s - leg.sent.at - NETWORK_S)
            )

    def _ended(self, now: float, leg: Leg) -> None:
        super()._ended(now, leg)
        self._expected[leg.worker.worker_id] -= 1
        if leg.kind is not LegKind.PREFILL:
            self._ended_request(now, _served(leg.replayed, self._parts.pop(leg.replayed.number)))

    def _ended_request(self, now: float, request: RequestFinished) -> None:
        if self.planner is not None:
            self.planner.ended(request, now)

    # The orchestrator.

    def _tick(self, now: float, number: int) -> None:
        if now < self._until:
            self.at(now + TICK_S, self._tick, number + 1)
        for worker in [each for each in self.workers.values() if self._has_drained(each)]:
            del self.workers[worker.worker_id]
            self._knowledge.left(worker, now)
            self.left.append(worker)
        ready = Counter(each.record.role for each in self.workers.values() if each.record.phase is WorkerPhase.READY)
        everybody = len(self.workers) + len(self._coming)
        self.sizes.append(Size(now, ready[Role.PREFILL], ready[Role.DECODE], everybody))
        if self.planner is not None:
            self._report(self.planner, now)
            if number % PLAN_TICKS == 0:
                self._plan(self.planner, now)

    def _report(self, planner: Planner, now: float) -> None:
        for worker in self.workers.values():
            worker.changes(now)
            worker.engine.poke(now)  # Steps that are simulated in advance would be reported all at once, at their end.
            self._woken(worker)
            planner.reported(worker.load_now(), now)

    def _plan(self, planner: Planner, now: float) -> None:
        fleet = [self._seen(worker, now) for worker in (*self.workers.values(), *self._coming)]
        decisions = planner.plan(fleet, now, round(now * 1000))
        self.decisions += decisions
        for decision in decisions:
            if decision.action is PlanAction.CHANGE_ROLE:
                self.at(now + self._delays.switch_s, self._change_role, planner, decision)
            elif decision.action is PlanAction.SCALE:
                assert decision.role is not None
                scale = self._start_workers if decision.change > 0 else self._drain_workers
                scale(decision.role, abs(decision.change), now)
                planner.set_outcome(decision, done=True, outcome="begun", now=now)

    def _seen(self, worker: SimWorker, now: float) -> FleetWorker:
        # The router is told of no bound, so that policies are compared by what engines can take; the planner must know.
        record = msgspec.structs.replace(worker.record, legs_max=self.profile.max_num_seqs)
        return FleetWorker(
            record=record,
            phase=record.phase,
            since_s=now - self._since.get(worker.worker_id, 0.0),
            silent_s=0.0,
            running=len(worker.engine.running),
            waiting=worker.engine.queued,
        )

    def _start_workers(self, role: Role, wanted: int, now: float) -> None:
        for number in (next(self._numbers_of_workers) for _each in range(wanted)):
            worker = SimWorker(number, role, self.profile, self, offset_s=PERIOD_S * (number % 10) / 10)
            worker.record = msgspec.structs.replace(worker.record, phase=WorkerPhase.STARTING)
            self._coming.append(worker)
            self._since[worker.worker_id] = now
            self.at(now + self._delays.start_s, self._has_started, worker)

    def _has_started(self, now: float, worker: SimWorker) -> None:
        self._coming.remove(worker)
        self._since[worker.worker_id] = now
        worker.record = msgspec.structs.replace(worker.record, phase=WorkerPhase.READY)
        self.workers[worker.worker_id] = worker
        self._knowledge.joined(worker, now)
        self._schedule_pass(now)

    def _drain_workers(self, role: Role, wanted: int, now: float) -> None:
        ready = [each for each in self.workers.values() if each.record.phase is WorkerPhase.READY]
        for worker in [each for each in ready if each.record.role is role][-wanted:]:
            self._rewrite(worker, now, phase=WorkerPhase.DRAINING)

    def _rewrite(self, worker: SimWorker, now: float, **changes: Any) -> None:
        worker.changes(now)
        worker.record = msgspec.structs.replace(worker.record, **changes)
        self.fleet.cluster.record(worker.record, now)
        self._schedule_pass(now)

    def _has_drained(self, worker: SimWorker) -> bool:
        is_leaving = worker.record.phase is WorkerPhase.DRAINING
        return is_leaving and not (self._expected[worker.worker_id] or worker.engine.pool.holders)

    def _change_role(self, now: float, planner: Planner, decision: PlanDecision) -> None:
        worker = self.workers[decision.worker_id]
        assert decision.role is not None
        self._rewrite(worker, now, role=decision.role)
        planner.set_outcome(decision, done=True, outcome="done", now=now)


def _told(replayed: ReplayedRequest, **more: Any) -> RequestFinished:
    return RequestFinished(request_id=RequestId(str(replayed.number)), model=MODEL, path="/v1/completions", **more)


def _turned_away(replayed: ReplayedRequest) -> RequestFinished:
    return _told(replayed, mode="", status=503)


def _served(replayed: ReplayedRequest, parts: TtftParts) -> RequestFinished:
    placement = replayed.placement
    assert placement is not None
    return _told(
        replayed,
        mode="aggregated" if placement.prefill is None else "disaggregated",
        status=200,
        prefill_worker=placement.prefill.record.worker_id if placement.prefill is not None else "",
        decode_worker=placement.decode.record.worker_id,
        prompt_tokens=replayed.request.input_tokens,
        completion_tokens=replayed.request.output_tokens,
        cached_tokens=replayed.cached_tokens,
        readback_tokens=replayed.fetched_tokens,
        ttft_s=replayed.ttft_s,
        itl_s=replayed.tpot_s,
        ttft_parts=parts,
    )
