"""Routers publish reservations for the legs that they place."""

from __future__ import annotations

from services.router.state.reservations import (
    ROUTERS_MAX,
    SILENT_S_MAX,
    SLOT_S,
    SLOTS_EACH,
    SLOTS_MAX,
    WORKERS_MAX,
    ReservationBook,
)
from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.routers import Reservation, Reservations

ONE = Reservation(worker_id=WorkerId("w1"), epoch=Epoch(1), tokens=100, context_tokens=150)


def message(seq: int, *made: Reservation, router: str = "r2") -> Reservations:
    return Reservations(router_id=RouterId(router), seq=seq, made=list(made))


def book() -> ReservationBook:
    return ReservationBook(RouterId("r1"))


def test_legs_for_one_worker_are_published_as_one_sum():
    mine = book()
    for tokens in (100, 50):
        mine.note(WorkerId("w1"), Epoch(1), tokens, tokens + 10)

    assert mine.message() == Reservations(
        router_id=RouterId("r1"),
        seq=1,
        made=[Reservation(worker_id=WorkerId("w1"), epoch=Epoch(1), legs=2, tokens=150, context_tokens=170)],
    )
    assert mine.message() == Reservations(router_id=RouterId("r1"), seq=2, made=[])


def test_another_routers_reservations_are_applied_once():
    mine = book()

    assert mine.hear(message(1, ONE), now=0.0) == [ONE]
    assert mine.hear(message(1, ONE), now=0.0) == []


def test_out_of_order_messages_are_ignored():
    mine = book()
    mine.hear(message(5), now=0.0)

    assert mine.hear(message(4, ONE), now=0.0) == []
    assert mine.hear(message(7, ONE), now=0.0) == [ONE]


def test_a_router_ignores_its_own_message():
    mine = book()

    assert mine.hear(message(1, ONE, router="r1"), now=0.0) == []
    assert mine.alone


def test_a_router_is_alone_until_another_reports():
    mine = book()
    assert mine.alone

    mine.hear(message(1), now=10.0)
    mine.forget_silent(now=10.0 + SILENT_S_MAX)
    assert not mine.alone

    mine.forget_silent(now=10.1 + SILENT_S_MAX)
    assert mine.alone


def test_no_reservations_are_kept_for_departed_routers():
    mine = book()
    mine.hear(message(1), now=0.0)
    mine.note(WorkerId("w1"), Epoch(1), 1, 1)

    mine.forget_silent(now=100.0)

    assert mine.message().made == []


def test_remembered_workers_and_routers_are_bounded():
    mine = book()
    for number in range(WORKERS_MAX + 10):
        mine.note(WorkerId(f"w{number}"), Epoch(1), 1, 1)
    for number in range(ROUTERS_MAX + 10):
        mine.hear(message(1, router=f"other-{number}"), now=0.0)

    assert len(mine.message().made) == WORKERS_MAX
    assert mine.others == ROUTERS_MAX


def test_a_single_router_acts_on_reports_at_once():
    assert book().lag_s() == 0.0


def test_routers_act_on_one_report_at_different_random_times():
    routers = [ReservationBook(RouterId(f"r{number}")) for number in range(3)]
    for mine in routers:
        for number in range(3):
            mine.hear(message(1, router=f"r{number}"), now=0.0)

    rounds = [[mine.lag_s() for mine in routers] for _ in range(200)]

    assert {lag for lags in rounds for lag in lags} == {SLOT_S * slot for slot in range(3 * SLOTS_EACH)}
    firsts = [[lags[number] == min(lags) for lags in rounds].count(True) for number in range(3)]
    assert min(firsts) > 200 / 3 / 2
    assert sum(min(lags) < sorted(lags)[1] for lags in rounds) > 200 / 2


def test_the_wait_is_bounded_for_any_number_of_routers():
    mine = book()
    for number in range(50):
        mine.hear(message(1, router=f"other-{number}"), now=0.0)

    assert max(mine.lag_s() for _ in range(1000)) < SLOT_S * SLOTS_MAX
