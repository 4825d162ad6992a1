"""How fast a peer's blocks are read: bounded in time and memory, and never claimed of a read that failed."""

from __future__ import annotations

from itertools import count

import pytest

from connector.messages import MeasureRead, Read, ReadMeasured, ReadPart
from connector.reader.fetch import Outbox
from connector.reader.peers import PeerMemory
from connector.reader.speed_test import (
    READ_BYTES_MAX,
    READ_BYTES_MIN,
    READ_S,
    READS_MAX,
    SHARE_MAX,
    TEST_S_MAX,
    TESTS_MAX,
    SpeedTests,
)
from shared.contracts.ids import Epoch, WorkerId

BLOCK_BYTES = 64 << 10
GPU, HOST = PeerMemory(4096, "cuda"), PeerMemory(4096, "cpu")


class Blocks:
    """A ``BlockAllocator``, reduced to what a measurement uses."""

    def __init__(self, blocks: int) -> None:
        self.fetch_blocks_max = blocks // 2
        self.free_blocks = list(range(blocks))
        self.used_max = 0
        self._blocks = blocks

    def allocate(self, wanted: int) -> list[int]:
        taken, self.free_blocks = self.free_blocks[:wanted], self.free_blocks[wanted:]
        self.used_max = max(self.used_max, self._blocks - len(self.free_blocks))
        return taken

    def free(self, blocks: list[int]) -> None:
        self.free_blocks += blocks


class Engine:
    """Reads at ``speed`` bytes/s after a delay of ``latency_s``; ``speed`` 0: reads do not end."""

    def __init__(self, speed: float, latency_s: float = 0.0, blocks: int = 16384) -> None:
        self.now = 0.0
        self.speed = speed
        self.latency_s = latency_s
        self.outbox = Outbox()
        self.blocks = Blocks(blocks)
        self.tests = SpeedTests(self.outbox, count(1), lambda: self.now)
        self.tests.bind(self.blocks)
        self.reads: list[Read] = []
        self.failure = ""

    def measure(self, peer: PeerMemory | None = HOST, device: str = "cpu", name: str = "m1") -> None:
        order = MeasureRead(measure_id=name, worker_id=WorkerId("p1"), epoch=Epoch(1))
        self.tests.start(order, peer, device)

    def run(self) -> ReadMeasured:
        while self.outbox.reads and self.speed:
            read = self.outbox.reads.pop(0)
            self.reads.append(read)
            size = len(read.local_blocks)
            took_s = self.latency_s + size * BLOCK_BYTES / self.speed
            began, self.now = self.now, self.now + took_s
            for first in range(0, size, 200):  # in parts
                length = min(200, size - first)
                part = ReadPart(read.read_id, first, length, length * BLOCK_BYTES, began, self.now, self.failure)
                assert self.tests.on_part(part)
            self.tests.on_time()
        (measured,) = self.tests.ended
        return measured


@pytest.mark.parametrize("speed", [5e6, 1e8, 3e9, 4e11], ids=["slow network", "1 Gb/s", "host memory", "NVLink"])
def test_the_speed_is_measured_within_bounds(speed):
    engine = Engine(speed, latency_s=20e-6)
    engine.measure()

    measured = engine.run()

    assert measured.failure == ""
    assert 0.75 * speed < measured.bytes_per_s < 1.01 * speed
    assert engine.now < TEST_S_MAX
    assert len(engine.reads) <= READS_MAX
    sizes = [len(read.local_blocks) * BLOCK_BYTES for read in engine.reads]
    assert max(sizes) <= READ_BYTES_MAX
    assert measured.bytes >= READ_BYTES_MIN
    assert len(engine.blocks.free_blocks) == 16384


def test_a_slow_first_read_does_not_spoil_the_result():
    """UCX connects and maps memory at the first read."""
    engine = Engine(1e9, latency_s=0.05)
    engine.measure()
    engine.tests.on_part(ReadPart(engine.outbox.reads.pop().read_id, 0, 1, BLOCK_BYTES, 0.0, 0.05))
    engine.latency_s = 0.0

    assert engine.run().bytes_per_s == pytest.approx(1e9)


def test_requests_keep_their_memory():
    engine = Engine(1e10, blocks=256)
    engine.measure()
    engine.run()

    assert engine.blocks.used_max == 128 * SHARE_MAX


def test_few_blocks_of_the_peer_are_enough():
    engine = Engine(1e9)
    engine.measure(PeerMemory(20, "cpu"))
    engine.run()

    assert max(max(read.remote_blocks) for read in engine.reads) == 19


@pytest.mark.parametrize(
    ("device", "peer", "memory"), [("cuda", GPU, "cuda"), ("cuda", HOST, "cpu"), ("cpu", GPU, "cpu")]
)
def test_only_memory_of_two_gpus_counts_as_gpu_memory(device, peer, memory):
    engine = Engine(1e9)
    engine.measure(peer, device)

    assert engine.run().memory == memory


def test_no_speed_is_told_of_few_bytes():
    engine = Engine(1e9, blocks=64)
    engine.measure()

    measured = engine.run()

    assert (measured.bytes_per_s, measured.failure) == (0.0, "too few blocks are free")


def test_no_speed_is_told_of_a_failed_read():
    engine = Engine(1e9)
    engine.failure = "the read failed"
    engine.measure()

    measured = engine.run()

    assert (measured.bytes_per_s, measured.failure) == (0.0, "the read failed")
    assert len(engine.blocks.free_blocks) == 16384


def test_blocks_of_a_read_that_hangs_are_kept_until_it_has_ended():
    engine = Engine(0)
    engine.measure()
    engine.now = TEST_S_MAX
    engine.tests.on_time()
    engine.tests.on_time()

    read = engine.outbox.reads[0]
    assert engine.outbox.cancel == [read.read_id]
    assert len(engine.blocks.free_blocks) == 16383
    assert not engine.tests.ended

    engine.tests.on_part(ReadPart(read.read_id, 0, 1, 0, 0.0, 4.0, "cancelled"))

    assert engine.tests.ended[0].failure == f"not read within {TEST_S_MAX:g} s"
    assert len(engine.blocks.free_blocks) == 16384
    assert not engine.tests.reads_under_way


def test_the_end_of_the_peer_ends_the_measurement():
    engine = Engine(0)
    engine.measure()
    engine.tests.on_peer_gone(("p1", 1))

    assert engine.outbox.cancel == [engine.outbox.reads[0].read_id]


def test_what_cannot_be_measured_is_refused():
    engine = Engine(1e9)
    engine.measure(None)
    assert engine.tests.ended.pop().failure == "not connected"

    for number in range(TESTS_MAX + 1):
        engine.measure(name=f"m{number}")

    assert [one.measure_id for one in engine.tests.ended] == [f"m{TESTS_MAX}"]
    assert engine.tests.ended[0].failure == "too many measurements at a time: try again later"


def test_a_read_takes_about_the_time_that_is_planned():
    engine = Engine(2e7)
    engine.measure()
    engine.run()

    assert engine.now < READ_S * READS_MAX
