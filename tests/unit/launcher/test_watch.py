"""The state that `baton top` keeps of the system."""

from __future__ import annotations

import msgspec
import pytest

from services.launcher.views.watch import (
    GONE_SHOWN_S,
    LOSS_EVENT_S,
    REQUESTS_MAX,
    SILENT_S_MAX,
    SPEED_S,
    WINDOW_S,
    Watch,
)
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import StoreState
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.unit.launcher.busy_system import join, request

LATER = 20.0
"""After the initial state is known."""


def watch() -> Watch:
    of = Watch(0.0)
    join(of, "p1", Role.PREFILL, WorkerPhase.READY, 1.0)
    join(of, "d1", Role.DECODE, WorkerPhase.READY, 1.0)
    return of


def events(of: Watch) -> list[str]:
    return [f"{one.subject} {one.text}" for one in of.events]


def test_only_workers_that_join_later_are_events():
    of = watch()
    assert events(of) == []

    join(of, "d2", Role.DECODE, WorkerPhase.STARTING, LATER)
    for phase in (WorkerPhase.PROBING, WorkerPhase.READY):
        join(of, "d2", Role.DECODE, phase, LATER)

    assert events(of) == ["d2 starting as decode", "d2 starting → probing", "d2 probing → ready"]


def test_a_new_epoch_resets_a_worker_and_old_epochs_are_ignored():
    of = watch()
    of.load_reported(load("d1", role=Role.DECODE, running=5), LATER)
    of.record(record("d1", epoch=2, role=Role.DECODE), LATER)
    of.record(record("d1", epoch=1, role=Role.PREFILL), LATER)
    of.load_reported(load("d1", epoch=1, role=Role.DECODE, running=5), LATER)

    assert of.workers[WorkerId("d1")].load is None
    assert of.workers[WorkerId("d1")].record.role is Role.DECODE
    assert events(of) == ["d1 ready again as decode"]


def test_a_role_change_is_one_event_for_report_and_record():
    of = watch()
    of.load_reported(load("d1", role=Role.PREFILL), LATER)
    of.record(record("d1", role=Role.PREFILL), LATER)

    assert events(of) == ["d1 role decode → prefill"]
    assert of.counts() == [(Role.PREFILL, 2, 2)]


def test_a_lost_worker_stays_visible_and_returns_with_its_next_report():
    of = watch()
    of.worker_lost(WorkerLost(worker_id=WorkerId("d1"), epoch=Epoch(1), silent_s=3.0), LATER)
    of.worker_lost(WorkerLost(worker_id=WorkerId("d1"), epoch=Epoch(1), silent_s=3.0), LATER)
    assert events(of) == ["d1 lost: no report for 3.0 s"]
    assert of.counts() == [(Role.PREFILL, 1, 1)]

    of.load_reported(load("d1", role=Role.DECODE), LATER + 1)
    assert of.workers[WorkerId("d1")].phase is WorkerPhase.READY

    of.record_removed(WorkerId("d1"), LATER + 2)
    of.tick(LATER + 2 + GONE_SHOWN_S)
    assert WorkerId("d1") in of.workers
    of.tick(LATER + 3 + GONE_SHOWN_S)
    assert WorkerId("d1") not in of.workers
    assert WorkerId("p1") in of.workers


def test_rates_are_the_growth_over_the_last_seconds():
    of = watch()
    for second in range(20):
        tokens = 100 * second if second < 10 else 1000 + 50 * (second - 10)
        of.load_reported(load("d1", role=Role.DECODE, generation_tokens_total=tokens), LATER + second)

    worker = of.workers[WorkerId("d1")]
    assert worker.per_s("generation_tokens_total") == pytest.approx(50.0)
    assert worker.reports[0][0] >= LATER + 19 - SPEED_S - 1


def test_traffic_covers_the_window():
    of = watch()
    of.finished([request(1)], 1.0)
    of.finished([request(2, mode="aggregated"), request(3, status=503, reason="overloaded")], WINDOW_S + 10.0)
    of.tick(WINDOW_S + 10.0)

    traffic = of.traffic(WINDOW_S + 10.0)
    assert (traffic.count, traffic.per_s) == (2, 2 / WINDOW_S)
    assert (dict(traffic.modes), dict(traffic.failed)) == ({"aggregated": 1}, {"overloaded": 1})
    assert [flow[:3] for flow in of.flows()] == [("prefill-1", "decode-1", 1)]


def test_the_rate_is_right_beyond_the_maximum_of_requests():
    of = watch()
    for number in range(2 * REQUESTS_MAX):
        of.finished([request(number)], 100.0 + number / 1000)

    assert of.traffic(100.0 + 2 * REQUESTS_MAX / 1000).per_s == pytest.approx(1000, rel=0.01)


def test_requests_of_each_second():
    of = watch()
    for at in (7.1, 7.9, 9.5, 10.2):
        of.finished([request(1)], at)

    assert of.each_second(10.5, 4) == [0, 2, 0, 1]


def test_the_leader_expires_without_fleet_states():
    of = watch()
    of.fleet_state(FleetState(leader="o1", term=1, workers=[]), 5.0)
    of.fleet_state(FleetState(leader="o2", term=2, workers=[]), 6.0)
    assert of.leader == "o2"

    of.tick(6.5 + SILENT_S_MAX)
    assert of.leader == ""
    assert events(of) == ["o2 is the leader now, term 2", "orchestrator no leader"]


def test_silent_services_are_dropped():
    of = watch()
    of.service_status(ServiceStatus(service="router", instance="r1", pid=1, phase=ServicePhase.READY), 1.0)
    of.tick(2.0)
    assert len(of.services) == 1

    of.tick(2.0 + SILENT_S_MAX)
    assert of.services == {}


def test_numbers_in_names_count_as_numbers():
    of = Watch(0.0)
    for name in ("decode-10", "decode-9", "x", "decode-1", "7", "decode"):
        join(of, name, Role.DECODE, WorkerPhase.READY, 1.0)

    assert [one.record.worker_id for one in of.ordered()] == ["decode", "decode-1", "decode-9", "decode-10", "x", "7"]


def test_lost_blocks_of_a_store_are_rate_limited_events():
    of = Watch(0.0)
    join(of, "s1", Role.STORE, WorkerPhase.READY, 1.0)

    def report(now: float, **numbers: int) -> None:
        of.load_reported(load("s1", role=Role.STORE, store=StoreState(**numbers)), now)

    report(2.0, saved_blocks_total=50)
    assert events(of) == []

    report(3.0, damaged_blocks_total=2)
    report(4.0, damaged_blocks_total=2, unsaved_blocks_total=8)
    assert events(of) == ["s1 blocks lost: 2 damaged on disk"]

    report(3.0 + LOSS_EVENT_S, damaged_blocks_total=2, unsaved_blocks_total=8)
    report(4.0 + 2 * LOSS_EVENT_S, damaged_blocks_total=2, unsaved_blocks_total=8)
    assert events(of)[1:] == ["s1 blocks lost: 2 damaged on disk, 8 not saved"]
    assert all(one.bad for one in of.events)


def test_engines_that_all_sleep_are_healthy_and_one_that_is_lost_beside_them_is_not():
    of = watch()
    of.service_status(ServiceStatus(service="router", instance="r1", pid=1, phase=ServicePhase.READY), LATER)
    of.fleet_state(FleetState(leader="o1", term=1, workers=[]), LATER)
    for worker, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        join(of, worker, role, WorkerPhase.ASLEEP, LATER)
    assert of.health(connected=True) == "healthy"

    of.worker_lost(WorkerLost(worker_id=WorkerId("d1"), epoch=Epoch(1), silent_s=3.0), LATER)
    assert of.health(connected=True) == "degraded"


def test_health_follows_routers_roles_and_the_leader():
    of = watch()
    assert of.health(connected=True) == "unhealthy"

    of.service_status(ServiceStatus(service="router", instance="r1", pid=1, phase=ServicePhase.READY), LATER)
    assert of.health(connected=True) == "degraded"

    of.fleet_state(FleetState(leader="o1", term=1, workers=[]), LATER)
    assert of.health(connected=True) == "healthy"
    assert of.health(connected=False) == "unhealthy"

    router = ServiceStatus(service="router", instance="r1", pid=1, phase=ServicePhase.READY)
    of.service_status(msgspec.structs.replace(router, warning="the key file cannot be read"), LATER)
    assert of.health(connected=True) == "degraded"
    of.service_status(router, LATER)
    assert of.health(connected=True) == "healthy"

    of.worker_lost(WorkerLost(worker_id=WorkerId("d1"), epoch=Epoch(1), silent_s=3.0), LATER)
    assert of.health(connected=True) == "degraded"
