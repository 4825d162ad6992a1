"""Measures how fast this engine reads a peer's blocks, for operators: UCX does not say that it fell back to TCP.

A few of the peer's blocks are read several times into free blocks of this engine, on the path that all reads take, and
dropped. No lease is needed, since their content does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from connector.messages import MeasureRead, PeerKey, Read, ReadMeasured, ReadPart
from connector.reader.fetch import Outbox
from connector.reader.peers import PeerMemory
from connector.reader.prefetch import BlockAllocator
from shared.contracts.kv_exchange import GROUP
from shared.contracts.workers import KvMemory

READ_BYTES_MAX = 32 << 20
"""Maximum size of a read: 11 ms at 3 GB/s, and long enough at the 400 GB/s of NVLink for a clock that is read every 0.1
ms."""
READ_BYTES_MIN = 1 << 20
"""A speed from fewer bytes says more about latency than about the transport."""
READ_S = 0.25
"""Each read is made so long, as far as the limits allow, by the speed of the one before. None follows a longer one."""
CLOCK_S = 1e-6
"""Shortest time that differs measurably from none."""
SHARE_MAX = 0.25
"""Share of the blocks that fetches may pin together."""
READS_MAX = 5
TEST_S_MAX = 3.0
TESTS_MAX = 4
"""Tests at a time; further ones are refused."""


@dataclass(slots=True)
class _Test:
    order: MeasureRead
    peer: PeerKey
    peer_blocks: int
    memory: KvMemory
    ends_at: float
    blocks: list[int]
    """Destination. The first read has one block: it tells the size of a block, and UCX prepares the connection."""
    read_id: int = 0
    left: int = 0
    """Blocks of the read under way that are not reported."""
    parts: list[ReadPart] = field(default_factory=list)
    """Parts of the read under way."""
    reads: int = 0
    bytes: int = 0
    """Size of the fastest read."""
    bytes_per_s: float = 0.0
    failure: str = ""


class SpeedTests:
    """All measurements of one engine. Used on the scheduler's thread."""

    def __init__(self, outbox: Outbox, numbers: Iterator[int], now: Callable[[], float]) -> None:
        """``numbers``: ids of reads, unique in the engine."""
        self.ended: list[ReadMeasured] = []
        self._outbox = outbox
        self._numbers = numbers
        self._now = now
        self._allocator: BlockAllocator
        self.under_way: list[_Test] = []

    def bind(self, allocator: BlockAllocator) -> None:
        """Set the engine's blocks. Called once, before all other methods."""
        self._allocator = allocator

    @property
    def reads_under_way(self) -> int:
        return len(self.under_way)

    def start(self, order: MeasureRead, peer: PeerMemory | None, device: str) -> None:
        """Begin to measure. The result is appended to ``ended``, at once if nothing can be read. ``device``: of this
        engine's blocks.
        """
        if peer is None or not peer.blocks:
            self._refuse(order, "not connected")
        elif len(self.under_way) >= TESTS_MAX:
            self._refuse(order, "too many measurements at a time: try again later")
        elif blocks := self._allocator.allocate(1):
            memory = KvMemory.CUDA if device == peer.device == "cuda" else KvMemory.CPU
            ends_at = self._now() + TEST_S_MAX
            test = _Test(order, (order.worker_id, order.epoch), peer.blocks, memory, ends_at, blocks)
            self.under_way.append(test)
            self._read(test)
        else:
            self._refuse(order, "no memory is free")

    def on_time(self) -> None:
        """Give up what is overdue."""
        for test in self.under_way:
            if self._now() >= test.ends_at:
                self._give_up(test, f"not read within {TEST_S_MAX:g} s")

    def on_part(self, part: ReadPart) -> bool:
        """A part of a read has ended. Returns whether the read is a measurement."""
        test = next((one for one in self.under_way if one.read_id == part.read_id), None)
        if test is None:
            return False
        test.left -= part.count
        test.parts.append(part)
        test.failure = test.failure or part.failure
        if not test.left:
            self._on_read(test)
        return True

    def on_peer_gone(self, key: PeerKey) -> None:
        """The worker with this epoch is gone."""
        for test in self.under_way:
            if test.peer == key:
                self._give_up(test, "the worker is gone")

    def _on_read(self, test: _Test) -> None:
        size = sum(part.bytes for part in test.parts)
        took_s = max(part.ended_s for part in test.parts) - min(part.started_s for part in test.parts)
        took_s = max(took_s, CLOCK_S)
        if test.failure or not size:
            self._finish(test)
            return
        test.reads += 1
        if size >= READ_BYTES_MIN and size / took_s > test.bytes_per_s:
            test.bytes, test.bytes_per_s = size, size / took_s
        if test.reads >= READS_MAX or took_s > READ_S:
            self._finish(test)
        else:
            self._grow(test, size / len(test.blocks), size / took_s)
            self._read(test)

    def _grow(self, test: _Test, block_bytes: float, bytes_per_s: float) -> None:
        """Allocate blocks for the next read."""
        share = int(self._allocator.fetch_blocks_max * SHARE_MAX)
        wanted = min(READ_BYTES_MAX, max(READ_BYTES_MIN, bytes_per_s * READ_S))
        more = min(math.ceil(wanted / block_bytes), share, test.peer_blocks) - len(test.blocks)
        test.blocks += self._allocator.allocate(more) if more > 0 else []

    def _read(self, test: _Test) -> None:
        count = len(test.blocks)
        test.read_id, test.left, test.parts = next(self._numbers), count, []
        self._outbox.reads.append(
            Read(
                read_id=test.read_id,
                peer=test.peer,
                remote_blocks=list(range(count)),
                local_blocks=list(test.blocks),
                until_s=test.ends_at,
                group=GROUP,
                part_blocks=self._outbox.part_blocks[GROUP],
            )
        )

    def _give_up(self, test: _Test, why: str) -> None:
        """The read is reported when no byte of it can move; until then its blocks stay allocated."""
        if not test.failure:
            test.failure = why
            self._outbox.cancel.append(test.read_id)

    def _finish(self, test: _Test) -> None:
        self.under_way.remove(test)
        self._allocator.free(test.blocks)
        failure = "" if test.bytes_per_s else test.failure or "too few blocks are free"
        self.ended.append(
            ReadMeasured(
                measure_id=test.order.measure_id,
                bytes=test.bytes,
                bytes_per_s=test.bytes_per_s,
                memory=test.memory,
                failure=failure,
            )
        )

    def _refuse(self, order: MeasureRead, why: str) -> None:
        self.ended.append(ReadMeasured(measure_id=order.measure_id, failure=why))
