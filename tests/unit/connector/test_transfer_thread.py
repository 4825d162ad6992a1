"""The transfer thread takes orders at once, reports their results, and fails the engine if it fails; a read ends with its
bytes or with a reason, and only after its last byte can have moved.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from connector.messages import Orders, Peer, PeerKey, Read, Results
from connector.transfer.memory_agent import MemoryAgent, MemoryNetwork
from connector.worker.connections import CONNECT_S_MAX, OPEN_S_MAX
from connector.worker.transfer_thread import PARTS_PER_PEER_MAX, READ_S_MAX, SELF_END_S_MAX, Copier, TransferThread
from shared.contracts.kv_exchange import GROUP, KvHandshake
from tests.support.faulty_agent import FaultyAgent
from tests.support.kv_engines import RankMemory, ReadingRank, Shape, handshake

BIG = Shape(blocks=64, layers=2, block_size=64, content=512)
"""2 x 4 x 64 x 512 x 4 bytes: 1 MB a block, 32 blocks a part."""
PART_BLOCKS = 32


@dataclass
class World:
    """One reader and any number of holders, all with agents of one process."""

    shape: Shape = field(default_factory=Shape)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.network = MemoryNetwork()
        self.agent: MemoryAgent = self.network.agent("reader")
        self.reading = ReadingRank(RankMemory(self.shape, 0))
        self.copier = Copier(self.agent, self.reading.own(self.agent), lambda: self.now)
        self.kept: list[RankMemory] = []

    def holder(self, worker_id: str = "holder", epoch: int = 1) -> KvHandshake:
        memory = RankMemory(self.shape, 0)
        memory.fill()
        self.kept.append(memory)
        agent = self.network.agent(f"{worker_id}-{epoch}")
        agent.register(memory.regions())
        return handshake([memory.described(agent.metadata())], self.shape, worker_id, epoch)

    def connected(self, worker_id: str = "holder", epoch: int = 1) -> PeerKey:
        self.copier.submit(Orders(connect=[Peer(handshake=self.holder(worker_id, epoch), clock_ahead_s=0.0)]))
        assert [one.failure for one in self.settled().connected] == [""]
        return worker_id, epoch

    def settled(self) -> Results:
        """Results after advancing until nothing more happens."""
        while self.copier.advance():
            pass
        self.copier.advance()
        return self.copier.take_results()

    def read(
        self, blocks: dict[int, int], until_s: float = 1000.0, key: PeerKey = ("holder", 1), read_id: int = 1
    ) -> None:
        self.copier.submit(
            Orders(reads=[Read(read_id, key, list(blocks.values()), list(blocks), until_s, GROUP, PART_BLOCKS)])
        )


def straight(count: int) -> dict[int, int]:
    return {block: block for block in range(count)}


def test_a_read_has_ended_with_the_last_of_its_parts():
    world = World(shape=BIG)
    world.connected()
    world.read(straight(PART_BLOCKS + 1))

    world.copier.advance()
    assert not world.copier.has_ended_a_read
    world.copier.advance()
    assert world.copier.has_ended_a_read

    assert [part.count for part in world.copier.take_results().parts] == [PART_BLOCKS, 1]
    assert not world.copier.has_ended_a_read


def test_blocks_arrive_at_their_destinations_and_nowhere_else():
    world = World()
    world.connected()

    world.read({7: 3, 8: 4, 0: 9})

    (part,) = world.settled().parts
    assert (part.read_id, part.first, part.count, part.failure) == (1, 0, 3, "")
    assert part.bytes == 3 * 3 * 4 * 8 * 16 * 4
    world.reading.assert_holds({7: 3, 8: 4, 0: 9})
    assert not world.copier.busy


def test_a_read_copies_the_layers_of_its_group_only():
    world = World(Shape(layers=3, groups=2))
    world.connected()

    world.copier.submit(Orders(reads=[Read(1, ("holder", 1), [3], [7], 1000.0, 1, PART_BLOCKS)]))

    (part,) = world.settled().parts
    block = world.reading.memory
    assert [bool(block.block(layer, 7).any()) for layer in range(3)] == [False, True, False]
    assert (part.failure, part.bytes) == ("", block.block(1, 7).nbytes)


def test_a_big_read_is_reported_part_by_part():
    world = World(BIG)
    world.connected()

    world.read(straight(64))

    parts = world.settled().parts
    assert [(part.first, part.count) for part in parts] == [(0, PART_BLOCKS), (PART_BLOCKS, PART_BLOCKS)]


def test_a_holder_that_dies_during_a_read_leaves_its_complete_parts():
    world = World(BIG)
    world.connected()
    world.read(straight(64))

    world.copier.advance()  # one part of a peer is begun at a time
    world.network.agents["holder-1"].close()
    results = world.settled()

    assert [(part.first, part.failure != "") for part in results.parts] == [(0, False), (PART_BLOCKS, True)]
    assert results.connected[0].failure, "the broken connection is reported, so that it is re-established"
    world.reading.assert_holds(straight(PART_BLOCKS))


def test_a_read_from_an_unknown_peer_fails_at_once():
    world = World()

    world.read({1: 1})

    assert world.settled().parts[0].failure == "not connected"


def test_blocks_that_the_holder_does_not_have_are_not_read():
    world = World()
    world.connected()

    world.read({1: 1, 2: 99})

    assert world.settled().parts[0].failure == "the peer has no such blocks"
    world.reading.assert_holds({})


def test_nothing_is_read_when_the_lease_is_over():
    world = World()
    world.connected()

    world.read({1: 1}, until_s=world.now)

    assert "before the read began" in world.settled().parts[0].failure
    world.reading.assert_holds({})


def test_bytes_that_arrive_after_the_lease_do_not_count():
    world = World()
    world.connected()
    world.agent.behaviour.stalled = True
    world.read({1: 1}, until_s=world.now + 1.0)
    assert world.settled().parts == []

    world.now += 1.5
    assert world.settled().parts == [], "the transfer still runs"
    world.agent.behaviour.stalled = False

    assert world.settled().parts[0].failure == "the lease ended before the read"


@pytest.mark.parametrize("abandoned_by", ["deadline", "cancelled"])
def test_an_abandoned_read_is_reported_only_when_it_is_over(abandoned_by):
    world = World()
    key = world.connected()
    world.agent.behaviour.stalled = True
    world.read({1: 1})
    world.settled()

    if abandoned_by == "deadline":
        world.now += READ_S_MAX + 0.1
    else:
        world.copier.submit(Orders(cancel=[1]))
    assert world.settled().parts == []
    world.now += SELF_END_S_MAX + 0.1
    results = world.settled()

    assert len(results.parts) == 1
    assert [one.peer for one in results.connected if one.failure] == [key], (
        "ending the read required closing the connection"
    )
    world.agent.behaviour.stalled = False
    world.settled()
    world.reading.assert_holds({})


def test_a_cancelled_read_that_waits_is_never_begun():
    world = World(BIG)
    world.connected()
    world.agent.behaviour.stalled = True
    world.read(straight(32), read_id=1)
    for read_id in range(2, PARTS_PER_PEER_MAX + 2):
        world.read(straight(1), read_id=read_id)
    world.settled()
    begun = len(world.agent.behaviour.reads)

    world.copier.submit(Orders(cancel=[PARTS_PER_PEER_MAX + 1]))
    world.agent.behaviour.stalled = False
    parts = {part.read_id: part.failure for part in world.settled().parts}

    assert parts[PARTS_PER_PEER_MAX + 1] == "cancelled"
    assert [failure for read_id, failure in parts.items() if read_id <= PARTS_PER_PEER_MAX] == [""] * PARTS_PER_PEER_MAX
    assert len(world.agent.behaviour.reads) == begun


def test_a_hung_peer_does_not_delay_the_others():
    world = World()
    slow, quick = world.connected("slow"), world.connected("quick")
    world.agent.behaviour.hung.add("slow-1")
    for read_id in range(1, 20):
        world.read({1: 1}, key=slow, read_id=read_id)
    world.settled()

    world.read({2: 2}, key=quick, read_id=99)

    assert [(part.read_id, part.failure) for part in world.settled().parts] == [(99, "")]


def test_a_failed_read_ends_the_connection():
    world = World()
    key = world.connected()
    world.agent.behaviour.fail_reads = True

    world.read({1: 1})

    results = world.settled()
    assert results.parts[0].failure == "the read failed"
    assert [one.peer for one in results.connected if one.failure] == [key]


def test_a_forgotten_peer_fails_what_is_read_from_it():
    world = World()
    key = world.connected()
    world.agent.behaviour.stalled = True
    world.read({1: 1}, read_id=1)
    world.settled()

    world.read({2: 2}, read_id=2)
    world.copier.submit(Orders(forget=[key]))
    results = world.settled()

    assert {part.read_id: part.failure for part in results.parts} == {1: "the peer is gone", 2: "the peer is gone"}
    assert not world.copier.busy


def test_a_peer_forgotten_and_added_in_one_step_is_reconnected():
    world = World()
    peer = Peer(handshake=world.holder(), clock_ahead_s=0.0)
    world.copier.submit(Orders(connect=[peer]))
    world.settled()

    world.copier.submit(Orders(forget=[("holder", 1)], connect=[peer]))
    world.read({1: 1})

    results = world.settled()
    assert [one.failure for one in results.connected] == [""]
    assert results.parts[0].failure == ""


def test_two_epochs_of_a_worker_are_two_peers():
    world = World()
    first, second = world.connected(epoch=1), world.connected(epoch=2)

    world.copier.submit(Orders(forget=[first]))
    world.read({1: 1}, key=first, read_id=1)
    world.read({2: 2}, key=second, read_id=2)

    failures = {part.read_id: part.failure for part in world.settled().parts}
    assert failures == {1: "not connected", 2: ""}


def test_a_known_peer_is_connected_once():
    world = World()
    peer = Peer(handshake=world.holder(), clock_ahead_s=0.0)

    world.copier.submit(Orders(connect=[peer]))
    world.copier.submit(Orders(connect=[peer]))
    world.settled()

    assert len(world.agent.behaviour.reads) == 1, "one probe"


def test_a_peer_with_other_kv_is_not_connected():
    world = World()
    peer = msgspec.structs.replace(world.holder(), fingerprint="another model")

    world.copier.submit(Orders(connect=[Peer(handshake=peer, clock_ahead_s=0.0)]))

    assert "fingerprint differs" in world.settled().connected[0].failure


def test_a_connection_that_does_not_work_in_time_is_reported():
    world = World()
    world.agent.behaviour.stalled = True
    world.copier.submit(Orders(connect=[Peer(handshake=world.holder(), clock_ahead_s=0.0)]))
    assert world.settled().connected == []

    world.now += CONNECT_S_MAX + 0.1

    assert "within" in world.settled().connected[0].failure
    assert not world.copier.busy


def test_the_ranks_of_an_engine_report_the_same_parts():
    cut = []
    for layers in (1, 4):
        world = World(Shape(blocks=PART_BLOCKS + 1, layers=layers))
        world.connected()
        world.read(straight(PART_BLOCKS + 1))
        cut.append([(part.first, part.count) for part in world.settled().parts])

    assert cut[0] == cut[1] == [(0, PART_BLOCKS), (PART_BLOCKS, 1)]


def opening(world: World) -> Peer:
    """Ordered to connect to a peer whose connection is being opened."""
    peer = Peer(handshake=world.holder("slow"), clock_ahead_s=0.0)
    world.agent.behaviour.opening.add("slow-1")
    world.copier.submit(Orders(connect=[peer]))
    assert not world.settled()
    return peer


def test_reads_go_on_while_another_connection_is_opened():
    world = World()
    quick = world.connected("quick")
    opening(world)

    world.read({2: 2}, key=quick)

    assert [part.failure for part in world.settled().parts] == [""]
    assert world.copier.busy


def test_a_read_waits_until_its_connection_is_open():
    world = World()
    opening(world)
    world.read({1: 1}, key=("slow", 1))
    assert not world.settled()

    world.agent.behaviour.opening.clear()
    results = world.settled()

    assert ([one.failure for one in results.connected], [part.failure for part in results.parts]) == ([""], [""])
    world.reading.assert_holds({1: 1})


def test_a_read_waits_no_longer_than_its_lease():
    world = World()
    opening(world)
    world.read({1: 1}, until_s=world.now + 1.0, key=("slow", 1))
    assert not world.settled()

    world.now += 1.0

    assert [part.failure for part in world.settled().parts] == ["the lease ended before the read began"]


def test_a_connection_that_is_not_opened_in_time_is_reported():
    world = World()
    opening(world)
    world.read({1: 1}, key=("slow", 1))

    world.now += OPEN_S_MAX + 0.1
    results = world.settled()

    assert "not opened within" in results.connected[0].failure
    assert [part.failure for part in results.parts] == ["not connected"]
    assert not world.copier.busy


def test_a_peer_forgotten_while_its_connection_is_opened_can_be_connected_again():
    world = World()
    peer = opening(world)

    world.copier.submit(Orders(forget=[("slow", 1)]))
    assert (world.copier.busy, world.settled()) == (False, Results())
    world.agent.behaviour.opening.clear()
    world.copier.submit(Orders(connect=[peer]))

    assert [one.failure for one in world.settled().connected] == [""]


SOON_S = 60.0
PEER = ("holder", 1)
BLOCKS = list(range(9))
"""Read in two parts."""


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
        self.transfers = TransferThread(lambda: Copier(agent, own, time.monotonic))

    def read(self, read_id: int = 1) -> None:
        self.transfers.submit(Orders(reads=[Read(read_id, PEER, [3], [4], time.monotonic() + 60.0, GROUP, 1)]))

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

    side.transfers.submit(
        Orders(reads=[Read(1, PEER, BLOCKS, BLOCKS, time.monotonic() + 60.0, GROUP, len(BLOCKS) - 1)])
    )

    assert len(reports.get(timeout=SOON_S).parts) == 2


def test_waiting_for_results_ends_when_there_are_none(sides):
    side = sides()

    assert not side.transfers.take_results(wait_s=0.01)


class Panic(BaseException):
    """As pyo3 raises it for a panic of Rust."""


@pytest.mark.parametrize("error", [KeyError("xpu"), OverflowError("too large"), Panic("slice index")], ids=repr)
def test_a_peer_is_lost_by_whatever_a_library_raises_while_it_connects(sides, error):
    def fail(number: int) -> None:
        if number == 1:
            raise error

    side = sides(fail)
    side.transfers.submit(Orders(connect=[side.peer]))
    (lost,) = side.until(lambda results: bool(results.connected)).connected

    side.transfers.submit(Orders(connect=[side.peer]))
    side.read()

    assert type(error).__name__ in lost.failure
    assert side.until(lambda results: bool(results.parts)).parts[0].failure == ""


@pytest.mark.parametrize("error", [KeyError("xpu"), Panic("slice index")], ids=repr)
def test_a_peer_is_lost_by_whatever_a_library_raises_while_it_reads(sides, error):
    def fail(number: int) -> None:
        if number == 2:
            raise error

    side = sides(fail)
    side.transfers.submit(Orders(connect=[side.peer]))
    side.read()
    results = side.until(lambda results: len(results.connected) == 2 and bool(results.parts))

    assert type(error).__name__ in results.parts[0].failure
    assert type(error).__name__ in results.connected[1].failure


def test_a_failed_transfer_thread_fails_the_engine(sides):
    def leave(_number: int) -> None:
        raise SystemExit("a bug")

    side = sides(leave)
    side.transfers.submit(Orders(connect=[side.peer]))

    with pytest.raises(RuntimeError, match="the transfer thread failed"):
        side.until(lambda _: False)
    with pytest.raises(RuntimeError, match="the transfer thread failed"):
        side.read()
