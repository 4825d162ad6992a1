"""Whatever the bus does to reservations, a router never counts one twice, nor one that nobody made."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.router.state.reservations import ReservationBook
from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.routers import Reservations

WORKERS = [WorkerId("w1"), WorkerId("w2")]
legs = st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 1000)), max_size=8)
batches = st.lists(legs, min_size=1, max_size=8)


def messages_of(batches: list[list[tuple[WorkerId, int]]]) -> list[Reservations]:
    sender = ReservationBook(RouterId("r1"))
    told = []
    for batch in batches:
        for worker_id, tokens in batch:
            sender.note(worker_id, Epoch(1), tokens, tokens)
        told.append(sender.message())
    return told


def heard_by(receiver: ReservationBook, told: list[Reservations]) -> Counter[WorkerId]:
    tokens: Counter[WorkerId] = Counter()
    for message in told:
        for one in receiver.hear(message, now=0.0):
            assert one.legs > 0
            tokens[one.worker_id] += one.tokens
    return tokens


def sent(batches: list[list[tuple[WorkerId, int]]]) -> Counter[WorkerId]:
    tokens: Counter[WorkerId] = Counter()
    for batch in batches:
        for worker_id, number in batch:
            tokens[worker_id] += number
    return tokens


@given(batches)
def test_messages_in_order_are_all_counted(batches):
    assert heard_by(ReservationBook(RouterId("r2")), messages_of(batches)) == sent(batches)


@given(batches, st.data())
def test_lost_doubled_and_disordered_messages_never_add_anything(batches, data):
    told = messages_of(batches)
    arriving = data.draw(st.lists(st.sampled_from(told), max_size=3 * len(told)))

    heard = heard_by(ReservationBook(RouterId("r2")), arriving)

    assert all(tokens <= sent(batches)[worker_id] for worker_id, tokens in heard.items())
