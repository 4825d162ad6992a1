"""The KV events that a worker publishes, with the snapshot for a router that missed one.

An engine may hold several copies of one block: it stores and removes each copy. On the wire a block is held or not, so
only the removal of the last copy counts. An engine with several KV cache groups tells of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from math import lcm
from operator import xor
from typing import Literal

from services.worker.engines.port import Engine, EngineDead
from shared.bus.port import Bus, BusDown, Envelope
from shared.contracts.channels import KV_EVENTS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import (
    MEMORIES,
    NARROW_MARK,
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


def blocks_of_windows(groups: Sequence[tuple[int, bool, int]]) -> tuple[int, dict[int, int]]:
    """Tokens of a window's block, and how many of them each window needs before a boundary, by group; 0 and nothing if
    some group is neither a window nor full attention. ``groups``: of each its block size, whether it is full attention,
    and its window in tokens (0: none).
    """
    windows = {group: (size, window) for group, (size, is_full, window) in enumerate(groups) if not is_full}
    if not windows or not all(window for _size, window in windows.values()):
        return 0, {}
    block = lcm(*(size for size, _window in windows.values()))
    return block, {group: max(1, -(-(window - 1) // block)) for group, (_size, window) in windows.items()}


def narrow_windows(groups: Sequence[tuple[int, bool, int]]) -> frozenset[int]:
    """Numbers of the groups whose window needs fewer blocks than another's; see ``blocks_of_windows``."""
    _block, blocks = blocks_of_windows(groups)
    return frozenset(group for group, count in blocks.items() if count < max(blocks.values()))


Narrow = Literal["narrow"]
NARROW: Narrow = "narrow"
"""Instead of a tier: what all groups with a narrower window than others hold."""


class EventTranslation:
    """Counts the copies of each block that the engine holds in each tier and KV cache group.

    On the wire, a block of full attention is held when all full-attention groups hold it, and one in the tier BOUNDARY
    when all other groups do. Of windows of several widths those are the widest; what the others hold is told there
    under other hashes (``NARROW_MARK``).
    """

    def __init__(self, full: Sequence[bool] = (True,), narrow: Collection[int] = ()) -> None:
        """``full``: for each KV cache group, whether it is full attention. ``narrow``: see ``narrow_windows``."""
        groups = range(len(full))
        others = [group for group in groups if not full[group] and group not in narrow]
        full_groups = [group for group in groups if full[group]]
        self._groups: dict[KvTier | Narrow, list[int]] = {
            **dict.fromkeys(MEMORIES, full_groups),
            KvTier.BOUNDARY: others or (list(groups) if len(full) > 1 else []),
            NARROW: sorted(narrow),
        }
        self._copies: defaultdict[tuple[KvTier, int], dict[int, int]] = defaultdict(dict)
        self._complete: defaultdict[KvTier | Narrow, Counter[int]] = defaultdict(Counter)
        """How many groups hold each block, of tiers with several groups."""

    def stored(
        self, hashes: Iterable[bytes], parent: bytes | None, tier: KvTier = KvTier.DEVICE, group: int = 0
    ) -> list[KvEvent]:
        """``hashes`` are full hashes of blocks of a group, one after the other in a prompt; ``parent`` is that of the
        block before them.
        """
        if not (tiers := self._told(tier, group)):
            return []
        short, copies = [block_hash64(full) for full in hashes], self._copies[tier, group]
        new: list[int] = []
        for block in short:
            count = copies.get(block, 0)
            copies[block] = count + 1
            if not count:
                new.append(block)
        before = None if parent is None else block_hash64(parent)
        return [
            _event(KvEventKind.STORED, held, told, before)
            for told in tiers
            if (held := short if len(self._groups[told]) == 1 else self._completed(told, new))
        ]

    def removed(self, hashes: Iterable[bytes], tier: KvTier = KvTier.DEVICE, group: int = 0) -> list[KvEvent]:
        """One copy of each of these blocks was removed from this tier."""
        copies = self._copies[tier, group]
        gone = [block for block in map(block_hash64, hashes) if _drop(copies, block)]
        return [
            _event(KvEventKind.REMOVED, lost, told)
            for told in self._told(tier, group)
            if (lost := gone if len(self._groups[told]) == 1 else self._broken(told, gone))
        ]

    def cleared(self) -> KvEvent:
        """Every tier is empty, or its content is unknown."""
        self._copies.clear()
        self._complete.clear()
        return KvEvent(kind=KvEventKind.CLEARED)

    def _told(self, tier: KvTier, group: int) -> list[KvTier | Narrow]:
        """What a change of this group may change on the wire."""
        tiers: list[KvTier | Narrow] = [tier]
        if tier is KvTier.DEVICE:
            tiers.append(KvTier.BOUNDARY)
        if tier in (KvTier.DEVICE, KvTier.BOUNDARY):
            tiers.append(NARROW)
        return [told for told in tiers if group in self._groups[told]]

    def _completed(self, tier: KvTier | Narrow, new: list[int]) -> list[int]:
        """Those of a group's new blocks that all groups hold now."""
        having = self._complete[tier]
        having.update(new)
        return [block for block in new if having[block] == len(self._groups[tier])]

    def _broken(self, tier: KvTier | Narrow, gone: list[int]) -> list[int]:
        """Those of a group's lost blocks that all groups held."""
        having = self._complete[tier]
        lost = [block for block in gone if having[block] == len(self._groups[tier])]
        for block in gone:
            having[block] -= 1
            if not having[block]:
                del having[block]
        return lost


def _event(kind: KvEventKind, blocks: list[int], told: KvTier | Narrow, parent: int | None = None) -> KvEvent:
    if isinstance(told, KvTier):
        return KvEvent(kind=kind, hashes=pack_hashes(blocks), tier=told, parent=parent)
    return KvEvent(kind=kind, hashes=pack_hashes(block ^ NARROW_MARK for block in blocks), tier=KvTier.BOUNDARY)


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
            object_hashes=self.held.packed(KvTier.OBJECT),
            boundary_hashes=self.held.packed(KvTier.BOUNDARY),
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
