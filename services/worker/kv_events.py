"""The KV events that a worker publishes, with the snapshot for a router that missed one.

An engine may hold several copies of one block: it stores and removes each copy. On the wire a block is held or not, so
only the removal of the last copy counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import reduce
from operator import xor

from services.worker.engines.port import Engine, EngineDead
from shared.bus.port import Bus, BusDown, Envelope
from shared.contracts.channels import KV_EVENTS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import (
    AskKvSnapshot,
    KvDigest,
    KvEvent,
    KvEventBatch,
    KvEventKind,
    KvSnapshot,
    KvTier,
    block_hash64,
    digest_xor,
    pack_hashes,
    unpack_hashes,
)


class EventTranslation:
    """Counts the copies of each block that the engine holds in each tier."""

    def __init__(self) -> None:
        self._copies: dict[KvTier, dict[int, int]] = {tier: {} for tier in KvTier}

    def stored(self, hashes: Iterable[bytes], parent: bytes | None, tier: KvTier = KvTier.DEVICE) -> KvEvent | None:
        """``hashes`` are full hashes of consecutive blocks; ``parent`` is that of the block before them."""
        short = [block_hash64(full) for full in hashes]
        copies = self._copies[tier]
        for block in short:
            copies[block] = copies.get(block, 0) + 1
        if not short:
            return None
        return KvEvent(
            kind=KvEventKind.STORED,
            hashes=pack_hashes(short),
            tier=tier,
            parent=None if parent is None else block_hash64(parent),
        )

    def removed(self, hashes: Iterable[bytes], tier: KvTier = KvTier.DEVICE) -> KvEvent | None:
        """One copy of each of these blocks was removed from this tier."""
        copies = self._copies[tier]
        gone = [block for block in map(block_hash64, hashes) if _drop(copies, block)]
        return KvEvent(kind=KvEventKind.REMOVED, hashes=pack_hashes(gone), tier=tier) if gone else None

    def cleared(self) -> KvEvent:
        """Every tier is empty, or its content is unknown."""
        for copies in self._copies.values():
            copies.clear()
        return KvEvent(kind=KvEventKind.CLEARED)


def _drop(copies: dict[int, int], block: int) -> bool:
    """Returns whether that was the last copy."""
    count = copies.get(block, 0)
    if count > 1:
        copies[block] = count - 1
        return False
    return copies.pop(block, None) is not None


class HeldBlocks:
    """The blocks held in each tier after the batch numbered ``seq``."""

    def __init__(self) -> None:
        self.seq = 0
        self._held: dict[KvTier, set[int]] = {tier: set() for tier in KvTier}
        self._xors = dict.fromkeys(KvTier, 0)

    def apply(self, events: Iterable[KvEvent]) -> int:
        """Apply one batch; returns its number."""
        for event in events:
            self._apply(event)
        self.seq += 1
        return self.seq

    def digest(self) -> KvDigest:
        return KvDigest(seq=self.seq, count=sum(map(len, self._held.values())), xor=digest_xor(self._xors.values()))

    def packed(self, tier: KvTier = KvTier.DEVICE) -> bytes:
        """Every block held in ``tier``, packed as in ``pack_hashes``."""
        return pack_hashes(self._held[tier])

    def _apply(self, event: KvEvent) -> None:
        if event.kind is KvEventKind.CLEARED:
            for tier, held in self._held.items():
                held.clear()
                self._xors[tier] = 0
            return
        hashes, held = set(unpack_hashes(event.hashes)), self._held[event.tier]
        if event.kind is KvEventKind.STORED:
            changed = hashes - held
            held |= changed
        else:
            changed = hashes & held
            held -= changed
        self._xors[event.tier] = reduce(xor, changed, self._xors[event.tier])


log = logging.getLogger("baton.worker")


class CachePublisher:
    """KV events with sequence numbers, and the snapshot that a router asks for when one is missing."""

    def __init__(self, bus: Bus, worker_id: WorkerId, epoch: Epoch) -> None:
        self.held = HeldBlocks()
        self._bus = bus
        self._worker_id = worker_id
        self._epoch = epoch
        self._pending: list[KvEvent] = []
        self._arrived = asyncio.Event()

    async def follow(self, engine: Engine) -> None:
        """Publish the engine's events until cancelled. Raises EngineDead."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(), name="publish-kv-events")
            async for events in engine.kv_events():
                self._pending.extend(events)
                self._arrived.set()
            raise EngineDead("the engine's KV events have ended")

    async def answer(self, _ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        return KvSnapshot(
            worker_id=self._worker_id,
            epoch=self._epoch,
            seq=self.held.seq,
            hashes=self.held.packed(),
            host_hashes=self.held.packed(KvTier.HOST),
            disk_hashes=self.held.packed(KvTier.DISK),
        )

    async def _publish(self) -> None:
        """All events of one loop turn go in one batch. A batch that cannot be sent leaves a gap in the numbers, after
        which routers ask for a snapshot.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            events, self._pending = self._pending, []
            seq = self.held.apply(events)
            batch = KvEventBatch(worker_id=self._worker_id, epoch=self._epoch, seq=seq, events=events)
            try:
                await self._bus.publish(KV_EVENTS, batch)
            except BusDown:
                log.debug("KV event batch %d was not sent: NATS is down", seq)
