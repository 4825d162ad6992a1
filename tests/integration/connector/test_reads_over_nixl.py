"""Reads between processes over real NIXL, and how they end when the holder does."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

import psutil
import pytest
from msgspec.structs import replace

from connector.messages import Orders, Peer, PeerKey, Read, Results
from connector.worker.connections import CONNECT_S_MAX
from connector.worker.transfer_thread import SELF_END_S_MAX, Copier, TransferThread
from shared.contracts.kv_exchange import GROUP, KvHandshake
from tests.support.faulty_agent import FaultyAgent
from tests.support.kv_engines import RankMemory, ReadingRank, Shape
from tests.support.kv_holders import Holder, start_holder
from tests.support.processes import quietest_cpu

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

REPORT_S_MAX = 60.0
BUSY_S_MAX = 5.0
"""What a busy machine adds; with it still less than a stuck read is given."""
IDLE_CPU_MAX = 0.1
"""Cores: of this process, which has threads of other tests, too."""
BIG = Shape(blocks=128, layers=2, block_size=64, content=512)
"""128 MB: 1 MB a block."""
PART_BLOCKS = 32


@dataclass
class ReadingEngine:
    """All ranks of a reading engine, each with its agent and its thread, in this process."""

    shape: Shape
    before_read: Callable[[int], None] = lambda _: None
    open_agent: Callable | None = None
    """Replaces the agent's own way of opening a connection."""
    ranks: list[ReadingRank] = field(default_factory=list)
    transfers: list[TransferThread] = field(default_factory=list)
    reports: list[Results] = field(default_factory=list)
    """Of each rank, all so far."""

    def __post_init__(self) -> None:
        from connector.transfer.nixl_agent import NixlAgent

        for rank in range(self.shape.ranks):
            name = f"reader-{os.getpid()}-{time.monotonic_ns()}"
            own = NixlAgent(name) if self.open_agent is None else NixlAgent(name, open_agent=self.open_agent)
            agent = FaultyAgent(own, self.before_read)
            reading = ReadingRank(RankMemory(self.shape, rank))
            copier = Copier(agent, reading.own(agent), time.monotonic)
            self.ranks.append(reading)
            self.transfers.append(TransferThread(lambda copier=copier: copier))
            self.reports.append(Results())

    def submit(self, orders: Orders) -> None:
        for transfers in self.transfers:
            transfers.submit(orders)

    def connect(self, handshake: KvHandshake) -> PeerKey:
        key = (handshake.worker_id, handshake.epoch)
        before = [len(report.connected) for report in self.reports]
        self.submit(Orders(connect=[Peer(handshake=handshake, clock_ahead_s=0.0)]))
        self.until(lambda: all(len(one.connected) > n for one, n in zip(self.reports, before, strict=True)))
        assert [report.connected[-1].failure for report in self.reports] == [""] * len(self.ranks)
        return key

    def read(
        self, blocks: dict[int, int], key: PeerKey = ("holder", 1), read_id: int = 1, within_s: float = 30.0
    ) -> None:
        until_s = time.monotonic() + within_s
        self.submit(
            Orders(reads=[Read(read_id, key, list(blocks.values()), list(blocks), until_s, GROUP, PART_BLOCKS)])
        )

    def until(self, seen: Callable[[], bool]) -> None:
        """Take reports until the test has seen what it waits for."""
        ends = time.monotonic() + REPORT_S_MAX
        while not seen():
            assert time.monotonic() < ends, self.reports
            for report, transfers in zip(self.reports, self.transfers, strict=True):
                new = transfers.take_results()
                report.connected.extend(new.connected)
                report.parts.extend(new.parts)
            time.sleep(0.001)

    def until_parts(self, count: int) -> None:
        self.until(lambda: all(len(report.parts) >= count for report in self.reports))

    def close(self) -> None:
        for transfers in self.transfers:
            transfers.close()


@pytest.fixture
def engines() -> Iterator[Callable[..., ReadingEngine]]:
    made: list[ReadingEngine] = []

    def make(*args, **kwargs) -> ReadingEngine:
        made.append(ReadingEngine(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def holders() -> Iterator[Callable[..., Holder]]:
    made: list[Holder] = []

    def make(*args, **kwargs) -> Holder:
        made.append(start_holder(*args, **kwargs))
        return made[-1]

    yield make
    for holder in made:
        holder.close()


def straight(count: int) -> dict[int, int]:
    return {block: block for block in range(count)}


@pytest.mark.parametrize(("held_by", "read_by"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
def test_each_rank_reads_its_heads_from_any_number_of_ranks(engines, holders, held_by, read_by):
    holder = holders(Shape(ranks=held_by))
    engine = engines(Shape(ranks=read_by, blocks=20))
    engine.connect(holder.handshake)

    engine.read({17: 3, 18: 4, 2: 9})
    engine.until_parts(1)

    for report, rank in zip(engine.reports, engine.ranks, strict=True):
        assert [(part.first, part.count, part.failure) for part in report.parts] == [(0, 3, "")]
        rank.assert_holds({17: 3, 18: 4, 2: 9})


@pytest.mark.parametrize(("held_as", "read_as"), [("BLHNC", "BLHNC"), ("BLHNC", "BHNC"), ("BHNC", "BLHNC")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_read_between_engines_of_different_layouts(engines, holders, held_as, read_as, ranks):
    holder = holders(Shape(dims=held_as))
    engine = engines(Shape(ranks=ranks, blocks=20, dims=read_as))
    engine.connect(holder.handshake)

    engine.read({17: 3, 18: 4, 2: 9})
    engine.until_parts(1)

    for rank in engine.ranks:
        rank.assert_holds({17: 3, 18: 4, 2: 9})


def test_a_connection_is_made_once_and_serves_read_after_read(engines, holders):
    holder = holders(Shape())
    engine = engines(Shape())
    engine.connect(holder.handshake)

    for number in range(10):
        engine.read({number: number}, read_id=number)
    engine.until_parts(10)

    assert len(engine.reports[0].connected) == 1
    engine.ranks[0].assert_holds(straight(10))


def test_a_killed_holder_fails_the_read_and_its_restart_is_read(engines, holders):
    holder = holders(Shape())
    engine = engines(Shape())
    key = engine.connect(holder.handshake)
    holder.kill()

    engine.read({1: 1})
    engine.until_parts(1)

    assert engine.reports[0].parts[0].failure
    assert engine.reports[0].connected[-1].peer == key
    assert engine.reports[0].connected[-1].failure

    new_key = engine.connect(holders(Shape(), epoch=2).handshake)
    engine.read({2: 2}, key=new_key, read_id=2)
    engine.until_parts(2)

    assert engine.reports[0].parts[1].failure == ""
    engine.ranks[0].assert_holds({2: 2})


def test_a_holder_killed_during_a_read_leaves_its_complete_parts(engines, holders):
    holder = holders(BIG)
    probe_and_two_parts = 3
    engine = engines(BIG, before_read=lambda number: holder.kill() if number == probe_and_two_parts + 1 else None)
    engine.connect(holder.handshake)

    engine.read(straight(128))
    engine.until_parts(4)

    came = [part.first for part in engine.reports[0].parts if not part.failure]
    assert came == [0, PART_BLOCKS]
    engine.ranks[0].assert_holds(straight(2 * PART_BLOCKS))


def open_second_agent(engine: ReadingEngine) -> int:
    """Read until a second thread copies; returns the number of parts read."""
    ends, parts = time.monotonic() + REPORT_S_MAX, 0
    while not [thread for thread in threading.enumerate() if thread.name.startswith("kv-second-copy")]:
        assert time.monotonic() < ends
        engine.read({block: block for block in range(PART_BLOCKS)}, read_id=1000 + parts)
        parts += 1
        engine.until_parts(parts)
    return parts


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core copies alone")
def test_two_threads_copy_a_large_read_completely(engines, holders):
    holder = holders(BIG)
    engine = engines(BIG)
    engine.connect(holder.handshake)
    before = open_second_agent(engine)

    moved = {(block + 37) % 128: block for block in range(128)}
    engine.read(moved)
    engine.until_parts(before + 4)

    assert {part.failure for part in engine.reports[0].parts} == {""}
    engine.ranks[0].assert_holds(moved)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core copies alone")
def test_a_restarted_holder_is_read_after_dying_under_two_threads(engines, holders):
    holder = holders(BIG)
    last_part = [0]
    engine = engines(BIG, before_read=lambda number: holder.kill() if number == last_part[0] else None)
    engine.connect(holder.handshake)
    before = open_second_agent(engine)
    the_probe = 1
    last_part[0] = the_probe + before + 3

    engine.read(straight(128))
    engine.until_parts(before + 4)
    came = [part for part in engine.reports[0].parts[before:] if not part.failure]
    assert {part.first for part in came} <= {0, PART_BLOCKS}, "the second one's other half may have been under way"
    whole = {part.first + at: part.first + at for part in came for at in range(part.count)}
    begun = range(2 * PART_BLOCKS)
    engine.ranks[0].assert_holds(whole, torn=set(begun) - set(whole))

    key = engine.connect(holders(BIG, epoch=2).handshake)
    engine.read(straight(128), key=key, read_id=2)
    engine.until_parts(before + 8)
    engine.ranks[0].assert_holds(straight(128))


@dataclass
class Gate:
    """Holds up work of the reader's agents."""

    opened: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.reached.set()
        self.passed.wait(REPORT_S_MAX)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.passed.set()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core copies alone")
def test_a_stuck_second_thread_keeps_the_blocks_of_its_read_and_nothing_else(engines, holders, gate):
    from connector.transfer.nixl_agent import ReadAgent, open_read_agent

    class StuckAgent(ReadAgent):
        def copy(self, *args):
            gate.wait()
            return ReadAgent.copy(self, *args)

    def open_agent(*args):
        gate.opened += 1
        agent = open_read_agent(*args)
        the_second_one = 2
        return agent if gate.opened != the_second_one else StuckAgent(agent.agent, agent.registered, agent.name)

    holder = holders(BIG)
    engine = engines(BIG, open_agent=open_agent)
    engine.connect(holder.handshake)
    parts = 0
    while not gate.reached.is_set():
        engine.read(straight(PART_BLOCKS), read_id=1000 + parts, within_s=1.0)
        parts += 1
        engine.until(lambda parts=parts: gate.reached.is_set() or len(engine.reports[0].parts) == parts)
    engine.until(lambda: any(one.failure for one in engine.reports[0].connected))
    key = engine.connect(holders(BIG, epoch=2).handshake)
    engine.read(straight(128), key=key, read_id=2)
    others = len(straight(128)) // PART_BLOCKS
    engine.until_parts(parts - 1 + others)

    assert [part.failure for part in engine.reports[0].parts if part.read_id == 2] == [""] * others
    assert not [part for part in engine.reports[0].parts if part.read_id == 1000 + parts - 1]

    gate.passed.set()
    engine.until_parts(parts + others)
    assert engine.reports[0].parts[-1].failure


def test_reads_go_on_while_another_peer_is_connected(engines, holders, gate):
    from connector.transfer.nixl_agent import open_read_agent

    def open_agent(*args):
        gate.opened += 1
        if gate.opened > 1:
            gate.wait()
        return open_read_agent(*args)

    engine = engines(Shape(), open_agent=open_agent)
    engine.connect(holders(Shape()).handshake)
    slow = holders(Shape(), epoch=2)
    engine.submit(Orders(connect=[Peer(handshake=slow.handshake, clock_ahead_s=0.0)]))
    assert gate.reached.wait(REPORT_S_MAX)

    engine.read({1: 1})
    engine.until_parts(1)
    assert engine.reports[0].parts[0].failure == ""
    gate.passed.set()
    engine.until(lambda: len(engine.reports[0].connected) > 1)
    assert engine.reports[0].connected[-1].failure == ""


def test_a_dead_holder_is_not_connected(engines, holders):
    holder = holders(Shape())
    holder.kill()
    engine = engines(Shape())

    engine.submit(Orders(connect=[Peer(handshake=holder.handshake, clock_ahead_s=0.0)]))
    engine.until(lambda: bool(engine.reports[0].connected))

    assert engine.reports[0].connected[0].failure


@contextmanager
def unanswering_port() -> Iterator[int]:
    """Attempts to connect to it are dropped: somebody listens there, and its queue is full."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            yield port


def moved(holder: Holder, worker_id: str, port: int) -> KvHandshake:
    """The holder's handshake under another name of the same length, with another TCP port."""
    listening = [
        one.laddr.port
        for one in psutil.Process(holder.process.pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
    rank = holder.handshake.ranks[0]
    metadata = rank.agent.replace(b"holder", worker_id.encode())
    for own in listening:
        assert own.to_bytes(2) in metadata
        metadata = metadata.replace(own.to_bytes(2), port.to_bytes(2))
    return replace(holder.handshake, worker_id=worker_id, ranks=[replace(rank, agent=metadata)])


def test_hosts_that_do_not_answer_delay_no_other_connection(engines, holders):
    from connector.transfer.nixl_agent import OPENING_AT_ONCE_MAX

    holder = holders(Shape())
    engine = engines(Shape())
    silent = [f"gone-{number}" for number in range(OPENING_AT_ONCE_MAX)]

    with unanswering_port() as port:
        peers = [*(moved(holder, name, port) for name in silent), holder.handshake]
        engine.submit(Orders(connect=[Peer(handshake=peer, clock_ahead_s=0.0) for peer in peers]))
        engine.until(lambda: len(engine.reports[0].connected) == len(peers))

    first, *others = engine.reports[0].connected
    assert (first.peer, first.failure) == (("holder", 1), "")
    assert first.seconds < CONNECT_S_MAX
    assert {one.failure for one in others} == {f"no byte could be read within {CONNECT_S_MAX} s"}


def test_a_read_that_is_cancelled_stops_between_parts(engines, holders):
    holder = holders(BIG)
    engine: ReadingEngine = engines(BIG, lambda number: engine.submit(Orders(cancel=[1])) if number == 2 else None)
    engine.connect(holder.handshake)

    engine.read(straight(128))
    engine.until_parts(4)

    assert [part.failure for part in engine.reports[0].parts[1:]] == ["cancelled"] * 3


def test_a_frozen_holder_writes_no_byte_after_the_report(engines, holders, monkeypatch):
    """Over TCP, where the holder's own process sends: nixl's cancel does not stop what is on its way."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    holder = holders(BIG)
    engine = engines(BIG)
    engine.connect(holder.handshake)
    holder.freeze()
    began = time.monotonic()

    engine.read(straight(128), within_s=0.5)
    engine.until_parts(4)
    took_s = time.monotonic() - began
    layers = engine.ranks[0].memory.layers
    reported = [layer.copy() for layer in layers]
    holder.go_on()  # and send; it may also die of it, for nobody listens

    engine.read({0: 0}, read_id=2)  # whatever is looked at from now on
    engine.until_parts(5)

    assert {bool(part.failure) for part in engine.reports[0].parts[:4]} == {True}
    assert 0.5 < took_s < 0.5 + SELF_END_S_MAX + BUSY_S_MAX
    assert all((now == then).all() for now, then in zip(layers, reported, strict=True))


def test_an_engine_that_reads_nothing_uses_no_cpu(engines, holders):
    holder = holders(Shape())
    engine = engines(Shape())
    engine.connect(holder.handshake)

    assert quietest_cpu([[psutil.Process()]], enough=IDLE_CPU_MAX) < IDLE_CPU_MAX
