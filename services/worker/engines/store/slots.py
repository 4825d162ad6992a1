"""Which slot of a tier below memory holds which block, and which block makes way for a new one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from services.worker.engines.simulated.core.block_cache import Change
from services.worker.engines.store.records import SlotRecord
from shared.contracts.kv_events import KvEventKind


@dataclass(slots=True)
class _Slot:
    slot: int
    checksum: bytes


class FileTier:
    """Maps blocks to slots of the block file. The least recently used block is evicted for a new one.

    A slot is free, being filled, or holds a named block. A held slot is not given to another block.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._by_name: OrderedDict[bytes, _Slot] = OrderedDict()
        """Slots by the name of their block, the least recently used first."""
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
        self._holders.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._holders[slot] -= 1
            if self._holders[slot]:
                continue
            del self._holders[slot]
            if slot in self._forgotten:
                self._forgotten.discard(slot)
                self.give_back([slot])

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
            self.give_back([slot])
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
                self.give_back([slot])

    def records(self) -> list[SlotRecord]:
        """Records for the index file, in order of use."""
        return [
            SlotRecord(name, entry.slot, entry.checksum, at)
            for at, (name, entry) in enumerate(self._by_name.items(), 1)
        ]

    def take_changes(self) -> list[Change]:
        """Changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            Change(kind, [name for _kind, name in same])
            for kind, same in groupby(changes, key=lambda change: change[0])
        ]

    def _forget(self, name: bytes) -> int:
        self._tell(KvEventKind.REMOVED, name)
        return self._by_name.pop(name).slot

    def _tell(self, kind: KvEventKind, name: bytes) -> None:
        self._changes.append((kind, name))


class ObjectTier(FileTier):
    """Maps blocks to places in objects of ``together`` places each, which are written, and evicted, as a whole."""

    def __init__(self, slots: int, together: int) -> None:
        super().__init__(slots // together * together)
        self.together = together
        self._free = list(range(self.slots // together - 1, -1, -1))
        """Objects."""
        self._used = Counter[int]()
        """Places of each object that hold a block or are being filled."""

    def restore(self, records: Iterable[SlotRecord]) -> None:
        for record in records:
            if record.slot < self.slots:
                self._by_name[record.name] = _Slot(record.slot, record.checksum)
                self._tell(KvEventKind.STORED, record.name)
                self._used[record.slot // self.together] += 1
        self._free = [number for number in self._free if not self._used[number]]

    def take(self, count: int) -> list[int]:
        """The first places of an object, at most ``count``. Its old blocks are removed before any byte changes."""
        number = None
        if count:
            number = self._free.pop() if self._free else self._evict()
        if number is None:
            return []
        taken = min(count, self.together)
        self._used[number] = taken
        return list(range(number * self.together, number * self.together + taken))

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            number = slot // self.together
            self._used[number] -= 1
            if not self._used[number]:
                del self._used[number]
                self._free.append(number)

    def _evict(self) -> int | None:
        """The object of the least recently used block of which no place is held or being filled; now empty."""
        held = {slot // self.together for slot in (*self._holders, *self._forgotten)}
        named = Counter(entry.slot // self.together for entry in self._by_name.values())
        for entry in self._by_name.values():
            number = entry.slot // self.together
            if number not in held and named[number] == self._used[number]:
                break
        else:
            return None
        names = [name for name, entry in self._by_name.items() if entry.slot // self.together == number]
        for name in names:
            self._forget(name)
        self.evicted_total += len(names)
        del self._used[number]
        return number
