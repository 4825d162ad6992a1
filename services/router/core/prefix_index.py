"""Which worker holds which KV block, exactly: fed by KV events, repaired by snapshots, checked by digests.

Each worker's entry follows that worker's own batch numbers. A gap, a new epoch or a digest that disagrees makes the
entry DEGRADED until a snapshot comes; batches that arrive meanwhile are kept (bounded) and replayed behind it. A
degraded entry still answers with the last it knew: a stale prefix is a better guess than none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvDigest, KvEventBatch, KvEventKind, KvSnapshot, unpack_hashes

PENDING_BATCHES_MAX = 1024
"""Batches kept for a worker while its snapshot is on the way; more are dropped and cost one more snapshot."""


class IndexState(StrEnum):
    """How far an entry can be trusted."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Something was missed; a snapshot is wanted."""
    FALLBACK = "fallback"
    """Nothing is known: this worker is placed by load alone until a snapshot succeeds."""


@dataclass(slots=True)
class Entry:
    """What the index knows of one worker."""

    epoch: Epoch
    bit: int
    state: IndexState = IndexState.DEGRADED
    seq: int = 0
    xor: int = 0
    claimed_seq: int = 0
    """The highest number that a digest spoke of: if it is not reached by the next digest, batches were lost."""
    held: set[int] = field(default_factory=set)
    pending: deque[KvEventBatch] = field(default_factory=lambda: deque(maxlen=PENDING_BATCHES_MAX))


class PrefixIndex:
    """The blocks of all workers. A block's holders are one integer with a bit for each worker."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.entries: dict[WorkerId, Entry] = {}
        self.bits_free: list[int] = []

    def join(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """A worker, or a new life of one, is there; what an older life held is forgotten."""
        entry = self.entries.get(worker_id)
        if entry is not None and entry.epoch >= epoch:
            return
        self.drop(worker_id)
        bit = self.bits_free.pop() if self.bits_free else 1 << len(self.entries)
        self.entries[worker_id] = Entry(epoch, bit)

    def drop(self, worker_id: WorkerId) -> None:
        """Forget a worker."""
        entry = self.entries.pop(worker_id, None)
        if entry is not None:
            self._clear(entry)
            self.bits_free.append(entry.bit)

    def apply(self, batch: KvEventBatch) -> bool:
        """Take in one batch. Answers whether a snapshot is wanted now. Raises ValueError on torn hashes.

        Batches of workers that have not joined are ignored: their snapshot will tell all.
        """
        entry = self.entries.get(batch.worker_id)
        if entry is None or batch.epoch < entry.epoch:
            return False
        if batch.epoch > entry.epoch:
            self.join(batch.worker_id, batch.epoch)
            entry = self.entries[batch.worker_id]
        if batch.seq <= entry.seq:
            return False
        if entry.state is IndexState.EXACT and batch.seq == entry.seq + 1:
            self._perform(entry, batch)
            return False
        if entry.state is IndexState.EXACT:
            entry.state = IndexState.DEGRADED
        entry.pending.append(batch)
        return True

    def restore(self, snapshot: KvSnapshot) -> bool:
        """Begin anew from ``snapshot`` and replay what came after it. Answers whether the entry is exact now.

        Raises ValueError on torn hashes.
        """
        if snapshot.worker_id not in self.entries:
            return False
        self.join(snapshot.worker_id, snapshot.epoch)
        entry = self.entries[snapshot.worker_id]
        if snapshot.epoch < entry.epoch or snapshot.seq < entry.seq:
            return entry.state is IndexState.EXACT
        hashes = unpack_hashes(snapshot.hashes)
        self._clear(entry)
        self._store(entry, hashes)
        entry.seq = snapshot.seq
        entry.claimed_seq = 0
        waiting = sorted(entry.pending, key=lambda batch: batch.seq)
        entry.pending.clear()
        entry.state = IndexState.EXACT
        for batch in waiting:
            self.apply(batch)
        return entry.state is IndexState.EXACT

    def check(self, worker_id: WorkerId, epoch: Epoch, digest: KvDigest) -> bool:
        """Compare with what the worker says it holds. Answers whether a snapshot is wanted now.

        Digests and batches travel on different subjects, so a digest may be ahead for a moment; only when the next
        one comes and the index has still not reached the first is something lost.
        """
        entry = self.entries.get(worker_id)
        if entry is None or entry.epoch != epoch:
            return False
        if entry.state is not IndexState.EXACT:
            return True
        if entry.seq == digest.seq:
            wrong = len(entry.held) != digest.count or entry.xor != digest.xor
        else:
            wrong = entry.seq < entry.claimed_seq
            entry.claimed_seq = max(entry.claimed_seq, digest.seq)
        if wrong:
            entry.state = IndexState.DEGRADED
        return wrong

    def doubt(self, worker_id: WorkerId) -> None:
        """Events may have been missed (dropped, or the bus was away)."""
        entry = self.entries.get(worker_id)
        if entry is not None and entry.state is IndexState.EXACT:
            entry.state = IndexState.DEGRADED

    def give_up(self, worker_id: WorkerId) -> None:
        """No snapshot is to be had: place this worker by load alone."""
        entry = self.entries.get(worker_id)
        if entry is not None:
            self._clear(entry)
            entry.state = IndexState.FALLBACK

    def state(self, worker_id: WorkerId) -> IndexState:
        """FALLBACK for workers that the index has not met."""
        entry = self.entries.get(worker_id)
        return entry.state if entry is not None else IndexState.FALLBACK

    def wanting(self) -> list[WorkerId]:
        """Workers whose snapshot is wanted."""
        return [worker_id for worker_id, entry in self.entries.items() if entry.state is not IndexState.EXACT]

    def match(self, hashes: Sequence[int]) -> dict[WorkerId, int]:
        """For every worker that holds the first block at all: how many blocks from the start it holds in a row."""
        entries = self.entries
        if not hashes or not entries:
            return {}
        holders = self.holders
        alive = first = holders.get(hashes[0], 0)
        if not alive:
            return {}
        depths: dict[int, int] = {}
        for depth, block in enumerate(hashes):
            still = alive & holders.get(block, 0)
            if still != alive:
                depths[alive & ~still] = depth
                alive = still
                if not alive:
                    break
        else:
            depths[alive] = len(hashes)
        return {
            worker_id: next(length for mask, length in depths.items() if mask & entry.bit)
            for worker_id, entry in entries.items()
            if entry.bit & first
        }

    def _perform(self, entry: Entry, batch: KvEventBatch) -> None:
        for event in batch.events:
            if event.kind is KvEventKind.STORED:
                self._store(entry, unpack_hashes(event.hashes))
            elif event.kind is KvEventKind.REMOVED:
                self._remove(entry, unpack_hashes(event.hashes))
            else:
                self._clear(entry)
        entry.seq = batch.seq

    def _store(self, entry: Entry, hashes: Iterable[int]) -> None:
        holders, held, bit = self.holders, entry.held, entry.bit
        for block in hashes:
            if block not in held:
                held.add(block)
                entry.xor ^= block
                holders[block] = holders.get(block, 0) | bit

    def _remove(self, entry: Entry, hashes: Iterable[int]) -> None:
        for block in hashes:
            if block in entry.held:
                entry.held.remove(block)
                entry.xor ^= block
                self._release(block, entry.bit)

    def _clear(self, entry: Entry) -> None:
        for block in entry.held:
            self._release(block, entry.bit)
        entry.held.clear()
        entry.xor = 0

    def _release(self, block: int, bit: int) -> None:
        left = self.holders[block] & ~bit
        if left:
            self.holders[block] = left
        else:
            del self.holders[block]
