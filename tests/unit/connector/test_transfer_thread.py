"""The transfer thread takes orders at once, reports their results, and fails the engine if it fails."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from connector.messages import Orders, Peer, Read, Results
from connector.transfer.memory_agent import MemoryNetwork
from connector.worker.transfer_thread import Copier, TransferThread
from tests.support.faulty_agent import FaultyAgent
from tests.support.kv_engines import RankMemory, ReadingRank, Shape, handshake

SOON_S = 60.0
PEER = ("holder", 1)
BIG = Shape(blocks=64, layers=2, block_size=64, content=512)
"""A block is 1 MB."""
PART_BYTES = 8 << 20
BLOCKS = list(range((PART_BYTES >> 20) + 1))
"""A read of two parts."""


class Side:
    """A holder, and a reader whose agent calls ``before_read``."""

    def __init__(self, before_read: Callable[[int], None] = lambda _: None, shape: Shape | None = None) -> None:
        network, shape = MemoryNetwork(), shape or Shape()
        self.held = RankMemory(shape, 0)
        self.held.fill()
        holder = network.agent("holder")
        holder.register(self.held.regions())
        self.peer = Peer(handshake=handshake([self.held.described(holder.metadata())], shape), clock_ahead_s=0.0)
        self.reading = ReadingRank(RankMemory(shape, 0))
        agent = FaultyAgent(network.agent("reader"), before_read)
        own = self.reading.own(agent)
        self.transfers = TransferThread(lambda: Copier(agent, own, time.monotonic, part_bytes=PART_BYTES))

    def read(self, read_id: int = 1) -> None:
        self.transfers.submit(Orders(reads=[Read(read_id, PEER, [3], [4], time.monotonic() + 60.0)]))

    def until(self, seen: Callable[[Results], bool]) -> Results:
        results = Results()
        ends = time.monotonic() + SOON_S
        while not seen(results):
            assert time.monotonic() < ends
            new = self.transfers.take_results(wait_s=SOON_S)
            results.connected += new.connected
            results.parts += new.parts
        return results


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*args) -> Side:
        made.append(Side(*args))
        return made[-1]

    yield make
    for side in made:
        side.transfers.close()


def test_one_step_may_connect_and_read(sides):
    side = sides()

    side.transfers.submit(Orders(connect=[side.peer]))
    side.read()

    assert side.until(lambda results: bool(results.parts)).parts[0].failure == ""
    side.reading.assert_holds({4: 3})


def test_orders_are_taken_while_a_read_is_copied(sides):
    copying, go_on, copied = threading.Event(), threading.Event(), threading.Event()

    def hold_up(number: int) -> None:
        if number == 2:
            copying.set()
            go_on.wait(SOON_S)
            copied.set()

    side = sides(hold_up)
    side.transfers.submit(Orders(connect=[side.peer]))
    side.read(1)
    assert copying.wait(SOON_S)

    side.read(2)
    assert not copied.is_set()
    go_on.set()

    assert [part.read_id for part in side.until(lambda results: len(results.parts) == 2).parts] == [1, 2]


def test_a_read_in_several_parts_is_reported_once(sides):
    reports: queue.Queue[Results] = queue.Queue()
    side = sides(lambda _: None, BIG)
    side.transfers.submit(Orders(connect=[side.peer]))
    side.until(lambda results: bool(results.connected))
    side.transfers.wake_on_results(lambda: reports.put(side.transfers.take_results()))

    side.transfers.submit(Orders(reads=[Read(1, PEER, BLOCKS, BLOCKS, time.monotonic() + 60.0)]))

    assert len(reports.get(timeout=SOON_S).parts) == 2


def test_waiting_for_results_ends_when_there_are_none(sides):
    side = sides()

    assert not side.transfers.take_results(wait_s=0.01)


def test_a_failed_transfer_thread_fails_the_engine(sides):
    def bug(_number: int) -> None:
        raise KeyError("a bug")

    side = sides(bug)
    side.transfers.submit(Orders(connect=[side.peer]))

    with pytest.raises(RuntimeError, match="the transfer thread failed"):
        side.until(lambda _: False)
    with pytest.raises(RuntimeError, match="the transfer thread failed"):
        side.read()
