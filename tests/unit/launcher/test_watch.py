"""What `baton top` makes of what it hears."""

from __future__ import annotations

import pytest

from services.launcher.views.watch import (
    GONE_SHOWN_S,
    REQUESTS_MAX,
    SILENT_S_MAX,
    SPEED_S,
    TROUBLE_S,
    WINDOW_S,
    Watch,
)
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import StoreState
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.unit.launcher.watched import join, request

LATER = 20.0
"""After what was there at the beginning is known."""


def watch() -> Watch:
    of = Watch(0.0)
    join(of, "p1", Role.PREFILL, WorkerPhase.READY, 1.0)
    join(of, "d1", Role.DECODE, WorkerPhase.READY, 1.0)
    return of


def news(of: Watch) -> list[str]:
    return [f"{one.what} {one.words}" for one in of.happened]


def test_who_is_there_at_the_beginning_is_no_news_and_who_comes_later_is():
    of = watch()
    assert news(of) == []

    join(of, "d2", Role.DECODE, WorkerPhase.STARTING, LATER)
    for phase in (WorkerPhase.PROBING, WorkerPhase.READY):
        join(of, "d2", Role.DECODE, phase, LATER)

    assert news(of) == ["d2 starting as decode", "d2 starting → probing", "d2 probing → ready"]


def test_a_new_life_of_a_worker_begins_with_nothing_and_an_old_one_is_not_believed():
    of = watch()
    of.reported(load("d1", role=Role.DECODE, running=5), LATER)
    of.record(record("d1", epoch=2, role=Role.DECODE), LATER)
    of.record(record("d1", epoch=1, role=Role.PREFILL), LATER)
    of.reported(load("d1", epoch=1, role=Role.DECODE, running=5), LATER)

    assert of.workers[WorkerId("d1")].load is None
    assert of.workers[WorkerId("d1")].record.role is Role.DECODE
    assert news(of) == ["d1 ready again as decode"]


def test_a_change_of_role_is_told_once_whoever_tells_it_first():
    of = watch()
    of.reported(load("d1", role=Role.PREFILL), LATER)
    of.record(record("d1", role=Role.PREFILL), LATER)

    assert news(of) == ["d1 is prefill now, was decode"]
    assert of.counts() == [(Role.PREFILL, 2, 2)]


def test_a_lost_worker_is_shown_for_a_while_and_comes_back_when_it_speaks():
    of = watch()
    of.lost(WorkerLost(worker_id=WorkerId("d1"), epoch=Epoch(1), silent_s=3.0), LATER)
    of.lost(WorkerLost(worker_id=WorkerId("d1"), epoch=Epoch(1), silent_s=3.0), LATER)
    assert news(of) == ["d1 lost: silent for 3.0 s"]
    assert of.counts() == [(Role.PREFILL, 1, 1)]

    of.reported(load("d1", role=Role.DECODE), LATER + 1)
    assert of.workers[WorkerId("d1")].phase is WorkerPhase.READY

    of.vanished(WorkerId("d1"), LATER + 2)
    of.passed(LATER + 2 + GONE_SHOWN_S)
    assert WorkerId("d1") in of.workers
    of.passed(LATER + 3 + GONE_SHOWN_S)
    assert WorkerId("d1") not in of.workers
    assert WorkerId("p1") in of.workers


def test_speeds_are_growth_over_the_last_seconds():
    of = watch()
    for second in range(20):
        tokens = 100 * second if second < 10 else 1000 + 50 * (second - 10)
        of.reported(load("d1", role=Role.DECODE, generation_tokens_total=tokens), LATER + second)

    worker = of.workers[WorkerId("d1")]
    assert worker.per_s("generation_tokens_total") == pytest.approx(50.0)
    assert worker.told[0][0] >= LATER + 19 - SPEED_S - 1


def test_requests_are_those_of_the_window():
    of = watch()
    of.served([request(1)], 1.0)
    of.served([request(2, mode="aggregated"), request(3, status=503, reason="overloaded")], WINDOW_S + 10.0)
    of.passed(WINDOW_S + 10.0)

    told = of.traffic(WINDOW_S + 10.0)
    assert (told.count, told.per_s) == (2, 2 / WINDOW_S)
    assert (dict(told.modes), dict(told.failed)) == ({"aggregated": 1}, {"overloaded": 1})
    assert [flow[:3] for flow in of.flows()] == [("prefill-1", "decode-1", 1)]


def test_more_requests_than_are_kept_still_make_the_right_rate():
    of = watch()
    for number in range(2 * REQUESTS_MAX):
        of.served([request(number)], 100.0 + number / 1000)

    assert of.traffic(100.0 + 2 * REQUESTS_MAX / 1000).per_s == pytest.approx(1000, rel=0.01)


def test_requests_of_each_second():
    of = watch()
    for at in (7.1, 7.9, 9.5, 10.2):
        of.served([request(1)], at)

    assert of.each_second(10.5, 4) == [0, 2, 0, 1]


def test_nobody_leads_when_nobody_says_so():
    of = watch()
    of.fleet(FleetState(leader="o1", term=1, workers=[]), 5.0)
    of.fleet(FleetState(leader="o2", term=2, workers=[]), 6.0)
    assert of.leader == "o2"

    of.passed(6.5 + SILENT_S_MAX)
    assert of.leader == ""
    assert news(of) == ["o2 leads now, term 2", "orchestrator nobody leads"]


def test_services_that_fell_silent_are_no_longer_counted():
    of = watch()
    of.service(ServiceStatus(service="router", instance="r1", pid=1, phase=ServicePhase.READY), 1.0)
    of.passed(2.0)
    assert len(of.services) == 1

    of.passed(2.0 + SILENT_S_MAX)
    assert of.services == {}


def test_numbers_in_names_count_as_numbers():
    of = Watch(0.0)
    for name in ("decode-10", "decode-9", "x", "decode-1", "7", "decode"):
        join(of, name, Role.DECODE, WorkerPhase.READY, 1.0)

    assert [one.record.worker_id for one in of.ordered()] == ["decode", "decode-1", "decode-9", "decode-10", "x", "7"]


def test_what_a_store_loses_is_told_but_not_with_each_of_its_reports():
    of = Watch(0.0)
    join(of, "s1", Role.STORE, WorkerPhase.READY, 1.0)

    def report(now: float, **numbers: int) -> None:
        of.reported(load("s1", role=Role.STORE, store=StoreState(**numbers)), now)

    report(2.0, saved_blocks_total=50)
    assert news(of) == []

    report(3.0, damaged_blocks_total=2)
    report(4.0, damaged_blocks_total=2, unsaved_blocks_total=8)
    assert news(of) == ["s1 blocks lost: 2 damaged on disk"]

    report(3.0 + TROUBLE_S, damaged_blocks_total=2, unsaved_blocks_total=8)
    report(4.0 + 2 * TROUBLE_S, damaged_blocks_total=2, unsaved_blocks_total=8)
    assert news(of)[1:] == ["s1 blocks lost: 2 damaged on disk, 8 not saved"]
    assert all(one.bad for one in of.happened)
