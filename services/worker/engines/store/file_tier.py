"""Maps blocks to slots of the block file. The least recently used block is evicted for a new one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from services.worker.engines.store.records import SlotRecord
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, block_hash64, pack_hashes


@dataclass(slots=True)
class _Slot:
    slot: int
    checksum: bytes


class FileTier:
    """A slot is free, being filled, or holds a named block. A held slot is not given to another block."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._by_name: OrderedDict[bytes, _Slot] = OrderedDict()
        """The least recently used first."""
        self._free = list(range(slots - 1, -1, -1))
        self._holders: Counter[int] = Counter()
        self._forgotten: set[int] = set()
        """Held slots whose block was dropped. They become free when the last hold ends."""
        self._changes: list[tuple[KvEventKind, bytes]] = []
        self.evicted_total = 0
        """Blocks evicted for new ones."""

    def __len__(self) -> int:
        return len(self._by_name)

    def restore(self, records: Iterable[SlotRecord]) -> None:
        """Load the records of the index, once, before any other call; the least recently used first."""
        taken = set()
        for record in records:
            if record.slot < self.slots:
                self._by_name[record.name] = _Slot(record.slot, record.checksum)
                self._tell(KvEventKind.STORED, record.name)
                taken.add(record.slot)
        self._free = [slot for slot in self._free if slot not in taken]

    def names(self) -> list[bytes]:
        """The least recently used first."""
        return list(self._by_name)

    def slot_of(self, name: bytes) -> int | None:
        entry = self._by_name.get(name)
        return None if entry is None else entry.slot

    def checksum_of(self, name: bytes) -> bytes:
        return self._by_name[name].checksum

    def used(self, chain: Sequence[bytes]) -> None:
        """Mark as used, so that the end of a chain is evicted before its beginning."""
        for name in reversed(chain):
            if name in self._by_name:
                self._by_name.move_to_end(name)

    def hold(self, slots: Iterable[int]) -> None:
        """Add one hold to each slot."""
        self._holders.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Remove one hold from each slot."""
        for slot in slots:
            self._holders[slot] -= 1
            if self._holders[slot]:
                continue
            del self._holders[slot]
            if slot in self._forgotten:
                self._forgotten.discard(slot)
                self._free.append(slot)

    def take(self, count: int) -> list[int]:
        """At most ``count`` slots for new content. Their old blocks are removed before any byte changes."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if len(taken) < count:
            evicted: list[bytes] = []
            for name, entry in self._by_name.items():
                if len(taken) + len(evicted) == count:
                    break
                if entry.slot not in self._holders:
                    evicted.append(name)
            taken += [self._forget(name) for name in evicted]
            self.evicted_total += len(evicted)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Return slots that were taken and not filled."""
        self._free.extend(slots)

    def put(self, name: bytes, slot: int, checksum: bytes) -> None:
        """Record that a taken slot holds this block."""
        if name in self._by_name:
            self._free.append(slot)
            return
        self._by_name[name] = _Slot(slot, checksum)
        self._tell(KvEventKind.STORED, name)

    def drop(self, name: bytes) -> None:
        """Remove a damaged block; does nothing if it is unknown."""
        if name in self._by_name:
            slot = self._forget(name)
            if slot in self._holders:
                self._forgotten.add(slot)
            else:
                self._free.append(slot)

    def records(self) -> list[SlotRecord]:
        """Records for the index file, in order of use."""
        return [
            SlotRecord(name, entry.slot, entry.checksum, at)
            for at, (name, entry) in enumerate(self._by_name.items(), 1)
        ]

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            KvEvent(
                kind=kind, hashes=pack_hashes(block_hash64(name) for _kind, name in same), tier=KvTier.DISK, parent=None
            )
            for kind, same in groupby(changes, key=lambda change: change[0])
        ]

    def _forget(self, name: bytes) -> int:
        self._tell(KvEventKind.REMOVED, name)
        return self._by_name.pop(name).slot

    def _tell(self, kind: KvEventKind, name: bytes) -> None:
        self._changes.append((kind, name))
