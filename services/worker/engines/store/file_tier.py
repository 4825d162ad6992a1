"""Which place in the file of blocks holds which block. The least recently used block makes room for a new one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from services.worker.engines.store.slot_records import SlotRecord
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, block_hash64, pack_hashes


@dataclass(slots=True)
class _Kept:
    slot: int
    checksum: bytes


class FileTier:
    """A place is free, being filled, or holds a named block; one that is held is not given to another block."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        """The least recently used first."""
        self._free = list(range(slots - 1, -1, -1))
        self._holders: Counter[int] = Counter()
        self._forgotten: set[int] = set()
        """Held places whose block has no name any more: free when nobody holds them."""
        self._changes: list[tuple[KvEventKind, bytes]] = []
        self.evicted_total = 0
        """Blocks that made room for others."""

    def __len__(self) -> int:
        return len(self._kept)

    def restore(self, records: Iterable[SlotRecord]) -> None:
        """What the index file says, once, before anything else; the least recently used first."""
        taken = set()
        for record in records:
            if record.slot < self.slots:
                self._kept[record.name] = _Kept(record.slot, record.checksum)
                self._tell(KvEventKind.STORED, record.name)
                taken.add(record.slot)
        self._free = [slot for slot in self._free if slot not in taken]

    def names(self) -> list[bytes]:
        """The least recently used first."""
        return list(self._kept)

    def slot_of(self, name: bytes) -> int | None:
        """Where the block of that name is."""
        kept = self._kept.get(name)
        return None if kept is None else kept.slot

    def checksum_of(self, name: bytes) -> bytes:
        """What its bytes must give."""
        return self._kept[name].checksum

    def used(self, chain: Sequence[bytes]) -> None:
        """These were asked for; the end of a chain goes before its beginning."""
        for name in reversed(chain):
            if name in self._kept:
                self._kept.move_to_end(name)

    def hold(self, slots: Iterable[int]) -> None:
        """Somebody needs what is there."""
        self._holders.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Somebody needs it no more."""
        for slot in slots:
            self._holders[slot] -= 1
            if self._holders[slot]:
                continue
            del self._holders[slot]
            if slot in self._forgotten:
                self._forgotten.discard(slot)
                self._free.append(slot)

    def take(self, count: int) -> list[int]:
        """At most so many places for new content. Their blocks are forgotten before a byte of them changes."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if len(taken) < count:
            going: list[bytes] = []
            for name, kept in self._kept.items():
                if len(taken) + len(going) == count:
                    break
                if kept.slot not in self._holders:
                    going.append(name)
            taken += [self._forget(name) for name in going]
            self.evicted_total += len(going)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Taken, and not filled."""
        self._free.extend(slots)

    def put(self, name: bytes, slot: int, checksum: bytes) -> None:
        """A taken place holds this block from now on."""
        if name in self._kept:
            self._free.append(slot)
            return
        self._kept[name] = _Kept(slot, checksum)
        self._tell(KvEventKind.STORED, name)

    def drop(self, name: bytes) -> None:
        """What is there is not what it was; harmless when it is gone already."""
        if name in self._kept:
            slot = self._forget(name)
            if slot in self._holders:
                self._forgotten.add(slot)
            else:
                self._free.append(slot)

    def records(self) -> list[SlotRecord]:
        """For the index file: in the order of use."""
        return [SlotRecord(name, kept.slot, kept.checksum, at) for at, (name, kept) in enumerate(self._kept.items(), 1)]

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            KvEvent(
                kind=kind, hashes=pack_hashes(block_hash64(name) for _kind, name in same), tier=KvTier.DISK, parent=None
            )
            for kind, same in groupby(changes, key=lambda change: change[0])
        ]

    def _forget(self, name: bytes) -> int:
        self._tell(KvEventKind.REMOVED, name)
        return self._kept.pop(name).slot

    def _tell(self, kind: KvEventKind, name: bytes) -> None:
        self._changes.append((kind, name))
