"""Notices reach the engine's socket while it listens; what others send there costs no more than the look at it."""

from __future__ import annotations

import queue
import time

import msgspec
import pytest

from connector.messages import Notice, Orders
from connector.scheduler.grant_socket import GRANT_BYTES_MAX, GrantSocket, new_socket_path
from connector.transfer.agent import TransferFailed
from connector.worker.notices import LOOK_S, NOTICES_AT_ONCE_MAX, Notices
from connector.worker.transfer_thread import Copier, TransferThread
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGrant
from tests.unit.connector.test_transfer_thread import World

SOON_S = 10.0
packed = msgspec.msgpack.encode


def grant(number: int = 0) -> KvGrant:
    return KvGrant(
        reader_id=WorkerId("r"), worker_id=WorkerId("h"), epoch=Epoch(1), ask_id="ask", number=number, final=False
    )


@pytest.fixture
def arrived():
    return queue.Queue()


@pytest.fixture
def engine(tmp_path, arrived):
    engine = GrantSocket(new_socket_path(tmp_path), arrived.put)
    yield engine
    engine.close()


class Agent:
    """Of NIXL: what has come."""

    def __init__(self):
        self.came = []
        self.looks = 0

    def notices(self):
        self.looks += 1
        came, self.came = self.came, []
        for one in came:
            if isinstance(one, Exception):
                raise one
        return came


class Listening:
    def __init__(self, path):
        self.now = 100.0
        self.agent = Agent()
        self.notices = Notices(self.agent, path, lambda: self.now)
        self.notices.listen(wanted=True)

    def look(self, *came):
        self.agent.came += came
        self.now += LOOK_S
        self.notices.look()


@pytest.fixture
def listening(engine):
    listening = Listening(engine.path)
    yield listening
    listening.notices.close()


def test_a_notice_reaches_the_engine(listening, arrived):
    listening.look(packed(grant()))

    assert arrived.get(timeout=SOON_S) == grant()


def test_looks_are_apart_and_end_with_the_waiting(listening):
    listening.look()
    listening.notices.look()
    assert listening.agent.looks == 1

    listening.notices.listen(wanted=False)
    listening.look()
    assert listening.agent.looks == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xc1",
        b"x" * (GRANT_BYTES_MAX + 1),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a name"),
        TransferFailed(""),
    ],
)
def test_what_is_no_grant_is_dropped(listening, arrived, sent):
    listening.look(sent)
    listening.look(packed(grant()))

    assert arrived.get(timeout=SOON_S) == grant()
    assert arrived.empty()


def test_of_a_flood_a_part_is_passed_on(listening, arrived):
    listening.look(*(packed(grant(number)) for number in range(10 * NOTICES_AT_ONCE_MAX)))

    for _ in range(NOTICES_AT_ONCE_MAX):  # Or fewer, if the socket's queue is shorter.
        try:
            last = arrived.get(timeout=0.2)
        except queue.Empty:
            break
    assert last.number < NOTICES_AT_ONCE_MAX


def test_an_engine_without_a_socket_looks_for_nothing():
    nowhere = Listening("")

    nowhere.look(packed(grant()))

    assert nowhere.agent.looks == 0


def test_an_engine_that_has_ended_loses_notices_only(listening, engine):
    engine.close()

    listening.look(packed(grant()))


def test_a_notice_goes_from_one_engines_thread_to_the_others(engine, arrived):
    """Also while nothing is read: a thread that listens does not sleep for good."""
    there, here = World(), World()
    reader = here.network.agent("engine")
    own = here.reading.own(reader)
    listener = TransferThread(
        lambda: Copier(reader, own, time.monotonic, notices=Notices(reader, engine.path, time.monotonic))
    )
    sender = there.copier = Copier(
        there.agent, there.reading.own(there.agent), lambda: there.now, notices=Notices(there.agent, "", lambda: 0.0)
    )
    key = there.connected("reader", 1)
    there.network.agents["reader-1"] = reader
    try:
        listener.submit(Orders(listens=True))
        sender.submit(Orders(notices=[Notice(key, packed(grant())), Notice(("stranger", 1), packed(grant(7)))]))

        assert arrived.get(timeout=SOON_S) == grant()
        assert arrived.empty()
    finally:
        listener.close()
