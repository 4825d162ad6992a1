"""A made-up system for pictures: busy workers of every role, traffic between them, and some events."""

from __future__ import annotations

import random

import msgspec

from services.launcher.views.watch import Watch
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.fleet_orders import WorkerDrained
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.planning import Demand, PlanAction, PlanDecision, RoleCount
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record

NOW = 1000.0
FLEET = {
    "prefill-1": (Role.PREFILL, WorkerPhase.READY),
    "prefill-2": (Role.PREFILL, WorkerPhase.DRAINING),
    "decode-1": (Role.DECODE, WorkerPhase.READY),
    "decode-2": (Role.DECODE, WorkerPhase.READY),
    "decode-10": (Role.DECODE, WorkerPhase.PROBING),
    "both-1": (Role.BOTH, WorkerPhase.READY),
    "store-1": (Role.STORE, WorkerPhase.READY),
}


def join(watch: Watch, worker_id: str, role: Role, phase: WorkerPhase, now: float, revision: str = "r") -> None:
    made = record(worker_id, phase=phase, role=role, revision=revision)
    note = "KV self-test with prefill-1" if phase is WorkerPhase.PROBING else ""
    watch.record(msgspec.structs.replace(made, note=note), now)


def request(number: int, **facts: object) -> RequestFinished:
    told: dict[str, object] = {
        "request_id": f"r{number}",
        "model": "m",
        "path": "/v1/completions",
        "mode": "disaggregated",
        "status": 200,
        "prefill_worker": f"prefill-{1 + number % 2}",
        "decode_worker": f"decode-{1 + number % 3 % 2}",
        "prompt_tokens": 2000 + number,
        "cached_tokens": 500,
        "completion_tokens": 100,
        "received_bytes": 50_000_000,
        "ttft_s": 0.1 + 0.001 * number,
        "itl_s": 0.01,
        "e2e_s": 1.5,
    }
    return RequestFinished(**{**told, **facts})  # type: ignore[arg-type]


def a_busy_system(workers: dict[str, tuple[Role, WorkerPhase]] | None = None) -> Watch:
    chance = random.Random(5)
    watch = Watch(NOW - 120)
    fleet = workers if workers is not None else FLEET
    for worker_id, (role, phase) in fleet.items():
        join(watch, worker_id, role, phase, NOW - 119)
    for second in range(5):
        for worker_id, (role, phase) in fleet.items():
            computes, answers = role in (Role.PREFILL, Role.BOTH), role in (Role.DECODE, Role.BOTH)
            report = load(
                worker_id,
                role=role,
                phase=phase,
                running=chance.randint(1, 40) if answers else 1,
                waiting=chance.randint(0, 4),
                waiting_tokens=chance.randint(0, 9000) if computes else 0,
                kv_blocks_used=chance.randint(10, 100),
                kv_blocks_total=100,
                computed_tokens_total=21_345 * second if computes else 0,
                generation_tokens_total=1234 * second if answers else 0,
                received_tokens_total=8000 * second if answers else 0,
                decode_s_per_token=0.0123 if answers else 0.0,
            )
            watch.load_reported(report, NOW - 5 + second)
    watch.fleet_state(FleetState(leader="orchestrator-1", term=3, workers=[]), NOW - 0.5)
    watch.service_status(ServiceStatus(service="router", instance="r1", pid=1, phase=ServicePhase.READY), NOW - 1)
    for number in range(50):
        watch.finished([request(number)], NOW - 50 + number)
    watch.finished([request(51, prefill_worker="", decode_worker="both-1", mode="aggregated")], NOW - 1)
    watch.finished(
        [request(52, status=503, reason="overloaded", ttft_s=-1.0, prefill_worker="", decode_worker="")], NOW - 0.5
    )
    some_events(watch)
    watch.tick(NOW)
    return watch


def some_events(watch: Watch) -> None:
    plan = PlanDecision(
        number=1,
        at_ms=0,
        model="m",
        demand=Demand(),
        roles=[
            RoleCount(role=Role.PREFILL, now=2, wanted=2, load=0.21),
            RoleCount(role=Role.DECODE, now=3, wanted=4, load=0.93),
        ],
        action=PlanAction.CHANGE_ROLE,
        worker_id=WorkerId("both-1"),
        role=Role.DECODE,
        why="decode is at 93% of what it can do, prefill at 21%",
    )
    watch.planned(plan, NOW - 42)
    drained = WorkerDrained(worker_id=WorkerId("decode-7"), epoch=Epoch(1), seconds=3.21, legs=12, prefixes=44)
    watch.worker_drained(drained, NOW - 20)
    watch.worker_lost(WorkerLost(worker_id=WorkerId("decode-2"), epoch=Epoch(1), silent_s=3.04), NOW - 3)
