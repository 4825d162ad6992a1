"""The KV blocks of each worker, exactly: updated by KV events, restored by snapshots, checked by digests.

Each worker's entry follows that worker's batch numbers. A gap, a new epoch or a different digest makes the entry
DEGRADED until a snapshot comes; batches that arrive meanwhile are kept (bounded) and applied after it. A degraded entry
keeps its last contents: a stale prefix is a better estimate than none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import Final

import numpy as np

from services.router.state.block_table import TIERS, BlockTable, Boundaries, Depths, Hashes, Mask, block_table
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import BLOCK_HASH_BYTES, KvDigest, KvEventBatch, KvEventKind, KvSnapshot, KvTier

STORED: Final = KvEventKind.STORED
REMOVED: Final = KvEventKind.REMOVED
DEVICE: Final = KvTier.DEVICE
PENDING_BATCHES_MAX: Final = 1024
"""Batches kept for a worker until its snapshot arrives; more are dropped and cost another snapshot."""


class IndexState(StrEnum):
    """How far an entry can be trusted."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Events were missed; a snapshot is needed."""
    FALLBACK = "fallback"
    """No contents: the worker is placed by load alone until a snapshot arrives."""


EXACT: Final = IndexState.EXACT


@dataclass(slots=True)
class WorkerEntry:
    """What the index knows of one worker."""

    epoch: Epoch
    slot: int
    """Row of the worker in the table and its position in the result of ``match_depths``, until it is dropped."""
    state: IndexState = IndexState.DEGRADED
    seq: int = 0
    claimed_seq: int = 0
    """The highest batch number in a digest: if the index has not reached it by the next digest, batches were lost."""
    pending: deque[KvEventBatch] = field(default_factory=lambda: deque(maxlen=PENDING_BATCHES_MAX))


class PrefixIndex:
    """The blocks of all workers."""

    def __init__(self, table: BlockTable | None = None) -> None:
        self.table: BlockTable = block_table() if table is None else table
        self.entries: dict[WorkerId, WorkerEntry] = {}
        self.slots: list[WorkerId | None] = []
        """The worker of each slot."""
        self._slots_free: list[int] = []
        self.moves = 0
        """Incremented when a worker gets or leaves a slot."""
        self.held: Callable[[int], bool] = self.table.held
        """Whether any worker holds a block; callable from any thread."""

    def join(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """A worker, or a new epoch of one; the blocks of an older epoch are dropped."""
        entry = self.entries.get(worker_id)
        if entry is None:
            self.entries[worker_id] = WorkerEntry(epoch, self._take_slot(worker_id))
        elif entry.epoch < epoch:
            self.table.clear(entry.slot)
            self.entries[worker_id] = WorkerEntry(epoch, entry.slot)

    def drop(self, worker_id: WorkerId) -> None:
        entry = self.entries.pop(worker_id, None)
        if entry is not None:
            self.table.clear(entry.slot)
            self.slots[entry.slot] = None
            self.moves += 1
            heappush(self._slots_free, entry.slot)

    def expect(self, batch: KvEventBatch) -> None:
        """The batch will be applied soon. Raises ValueError on hashes that are not whole."""
        for event in batch.events:
            tier = event.tier
            self.table.expect(0 if tier is DEVICE else TIERS.index(tier), event.hashes)

    def apply(self, batch: KvEventBatch) -> bool:
        """Returns whether a snapshot is needed now. Raises ValueError on hashes that are not whole.

        Batches of workers that have not joined are ignored: their snapshot will contain them.
        """
        entry = self.entries.get(batch.worker_id)
        if entry is None or batch.epoch < entry.epoch:
            return False
        if batch.epoch > entry.epoch:
            self.join(batch.worker_id, batch.epoch)
            entry = self.entries[batch.worker_id]
        if batch.seq <= entry.seq:
            return False
        if entry.state is EXACT and batch.seq == entry.seq + 1:
            self._perform(entry, batch)
            return False
        if entry.state is EXACT:
            entry.state = IndexState.DEGRADED
        entry.pending.append(batch)
        return True

    def restore(self, snapshot: KvSnapshot) -> bool:
        """Replace the contents by ``snapshot`` and apply later batches. Returns whether the entry is exact now.

        Raises ValueError on hashes that are not whole.
        """
        if snapshot.worker_id not in self.entries:
            return False
        self.join(snapshot.worker_id, snapshot.epoch)
        entry = self.entries[snapshot.worker_id]
        if snapshot.epoch < entry.epoch or snapshot.seq < entry.seq:
            return entry.state is IndexState.EXACT
        tiers = (
            snapshot.hashes,
            snapshot.host_hashes,
            snapshot.disk_hashes,
            snapshot.object_hashes,
            snapshot.boundary_hashes,
        )
        if any(len(hashes) % BLOCK_HASH_BYTES for hashes in tiers):
            raise ValueError(f"a snapshot of {snapshot.worker_id} has torn hashes")
        self.table.clear(entry.slot)
        for tier, hashes in enumerate(tiers):
            if hashes:
                self.table.store(entry.slot, tier, hashes)
        entry.seq = snapshot.seq
        entry.claimed_seq = 0
        waiting = sorted(entry.pending, key=lambda batch: batch.seq)
        entry.pending.clear()
        entry.state = IndexState.EXACT
        for batch in waiting:
            self.apply(batch)
        return entry.state is IndexState.EXACT

    def check(self, worker_id: WorkerId, epoch: Epoch, digest: KvDigest) -> bool:
        """Compare with the worker's own digest. Returns whether a snapshot is needed now.

        Digests and batches travel on different subjects, so a digest may be ahead for a moment. Batches are lost only
        if the index has not reached a digest's number when the next digest comes.
        """
        entry = self.entries.get(worker_id)
        if entry is None or entry.epoch != epoch:
            return False
        if entry.state is not EXACT:
            return True
        if entry.seq == digest.seq:
            wrong = (self.table.count(entry.slot), self.table.xor(entry.slot)) != (digest.count, digest.xor)
        else:
            wrong = entry.seq < entry.claimed_seq
            entry.claimed_seq = max(entry.claimed_seq, digest.seq)
        if wrong:
            entry.state = IndexState.DEGRADED
        return wrong

    def doubt(self, worker_id: WorkerId) -> None:
        """Events may have been missed (dropped, or a bus outage)."""
        entry = self.entries.get(worker_id)
        if entry is not None and entry.state is IndexState.EXACT:
            entry.state = IndexState.DEGRADED

    def give_up(self, worker_id: WorkerId) -> None:
        """No snapshot arrives: place this worker by load alone."""
        entry = self.entries.get(worker_id)
        if entry is not None:
            self.table.clear(entry.slot)
            entry.state = IndexState.FALLBACK

    def state(self, worker_id: WorkerId) -> IndexState:
        """FALLBACK for unknown workers."""
        entry = self.entries.get(worker_id)
        return entry.state if entry is not None else IndexState.FALLBACK

    def wanting(self) -> list[WorkerId]:
        """Workers whose snapshot is needed."""
        return [worker_id for worker_id, entry in self.entries.items() if entry.state is not IndexState.EXACT]

    def slot(self, worker_id: WorkerId) -> int:
        """The worker's position in the result of ``match_depths``; -1 for an unknown worker."""
        entry = self.entries.get(worker_id)
        return -1 if entry is None else entry.slot

    def count(self, worker_id: WorkerId) -> int:
        """Blocks that this worker holds; one that lies in two tiers counts twice."""
        entry = self.entries.get(worker_id)
        return 0 if entry is None else self.table.count(entry.slot)

    def evictions(self, worker_id: WorkerId) -> tuple[int, int]:
        """Blocks that this worker lately evicted, and those that it stored and of which no worker had a copy any more:
        see ``BlockTable``.
        """
        entry = self.entries.get(worker_id)
        return (0, 0) if entry is None else self.table.evictions(entry.slot)

    def match_depths(self, hashes: Hashes) -> Depths:
        """For every slot: how many blocks from the start it holds in a row."""
        depths = np.zeros(len(self.slots), np.int32)
        self.table.depths(hashes, depths)
        return depths

    def match_boundaries(self, hashes: Hashes, at: Boundaries) -> Depths:
        """As ``match_depths`` for a model with boundaries: the longest usable prefix of every slot, in hashes."""
        depths = np.zeros(len(self.slots), np.int32)
        self.table.boundaries(hashes, at, depths)
        return depths

    def match(self, hashes: Hashes) -> dict[WorkerId, int]:
        """For every worker that holds the first block at all: how many blocks from the start it holds in a row."""
        depths = self.match_depths(hashes)
        matches = {self.slots[slot]: int(depths[slot]) for slot in np.flatnonzero(depths)}
        return {worker_id: depth for worker_id, depth in matches.items() if worker_id is not None}

    def cover(self, hashes: Hashes, first: int, end: int, allowed: Mask) -> list[tuple[int, int, int]]:
        """The fewest slots among ``allowed`` that together hold the blocks from ``first`` to before ``end``, each with
        the part to take from it; as far as the first block that none of them holds.
        """
        return self.table.cover(hashes, first, end, allowed)

    def _take_slot(self, worker_id: WorkerId) -> int:
        self.moves += 1
        if self._slots_free:
            slot = heappop(self._slots_free)
            self.slots[slot] = worker_id
            return slot
        self.slots.append(worker_id)
        return len(self.slots) - 1

    def _perform(self, entry: WorkerEntry, batch: KvEventBatch) -> None:
        table, slot = self.table, entry.slot
        for event in batch.events:
            kind, tier = event.kind, event.tier
            if kind is STORED:
                table.store(slot, 0 if tier is DEVICE else TIERS.index(tier), event.hashes)
            elif kind is REMOVED:
                table.remove(slot, 0 if tier is DEVICE else TIERS.index(tier), event.hashes)
            else:
                table.clear(slot)
        entry.seq = batch.seq
