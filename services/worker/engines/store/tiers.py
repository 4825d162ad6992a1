"""A store's blocks in memory and in files.

Other workers read memory only. Blocks that arrive in memory are saved to files soon after. Requested blocks that are
only in files are loaded into memory. Loads and saves are jobs of a few blocks each; loads come first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import msgspec

from connector.reader.groups import Blocks
from connector.reader.prefetch import Held
from services.worker.engines.simulated.core.block_cache import BlockCache, CacheBlockAllocator
from services.worker.engines.store.records import SlotRecord
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, block_hash64, pack_hashes


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


SAVE_AGAIN_S = 10.0
"""Pause after a failed save, for example on a full disk."""


class JobKind(Enum):
    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Job:
    """Copy each named block between its block of memory and its slot of the file. The result is their checksums."""

    kind: JobKind
    names: tuple[bytes, ...]
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(slots=True)
class Counts:
    """Totals since the store started, in blocks."""

    loaded: int = 0
    saved: int = 0
    damaged: int = 0
    """Blocks whose checksum did not match when they were loaded."""
    unsaved: int = 0
    """Blocks that could not be written."""


class Tiers:
    """A ``connector.reader.prefetch.BlockAllocator``. Slots of the file are numbered after the blocks of memory."""

    def __init__(self, memory: BlockCache, files: FileTier, job_blocks_max: int) -> None:
        self.memory = memory
        self.files = files
        self._allocator = CacheBlockAllocator(memory)
        self._job_blocks_max = job_blocks_max
        self._to_load: dict[bytes, None] = {}
        self._to_save: dict[bytes, None] = {}
        """Names of blocks to save, in order of arrival, at most as many as memory has blocks. Blocks evicted before
        their save are not saved."""
        self._loading: set[bytes] = set()
        self._saves_at = 0.0
        self.counts = Counts()

    @property
    def fetch_blocks_max(self) -> int:
        """All: a store has no requests to keep blocks for."""
        return self.memory.blocks + self.files.slots

    def hold(self, hashes: Sequence[bytes]) -> Held:
        """Hold the longest prefix of these that is in memory or in files."""
        held: list[int] = []
        for name in hashes:
            if (block := self.memory.block_of(name)) is not None:
                held.append(block)
            elif (slot := self.files.slot_of(name)) is not None:
                held.append(self.memory.blocks + slot)
            else:
                break
        blocks, slots = self._apart(held)
        self.memory.hold(blocks)
        self.files.hold(slots)
        return Held(len(held), len(held), held)

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks of memory for new content."""
        return self._allocator.allocate(count)

    def cache(self, hashes: Sequence[bytes], blocks: Blocks, boundary: int) -> None:
        """Make arrived blocks readable to others and queue them for saving."""
        self._allocator.cache(hashes, blocks, boundary)
        if self.files.slots:
            self._to_save.update(dict.fromkeys(hashes[blocks.first : blocks.end]))
            while len(self._to_save) > self.memory.blocks:
                del self._to_save[next(iter(self._to_save))]

    def free(self, blocks: Sequence[int]) -> None:
        """Release blocks from ``hold`` or ``allocate``."""
        in_memory, slots = self._apart(blocks)
        self.memory.release(in_memory)
        self.files.release(slots)

    def requested(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note that a reader requests these. Returns the blocks to load first, as many as memory can take."""
        chain: list[bytes] = []
        missing: list[bytes] = []
        for name in hashes:
            if self.memory.block_of(name) is None:
                if self.files.slot_of(name) is None:
                    break
                missing.append(name)
            chain.append(name)
        self.files.used(chain)
        if not missing:
            return []
        present = [block for block in map(self.memory.block_of, chain) if block is not None]
        self.memory.hold(present)  # Loading must not evict blocks of the same chain.
        loadable = self.memory.free
        self.memory.release(present)
        return missing[:loadable]

    def load(self, names: Iterable[bytes]) -> None:
        """Queue these for loading."""
        self._to_load.update(dict.fromkeys(name for name in names if name not in self._loading))

    def next_job(self, now: float) -> Job | None:
        """The next job, or None; ``ended`` must follow."""
        return self._next_load() or (self._next_save() if now >= self._saves_at else None)

    def saves_at(self, now: float) -> float | None:
        """When saving resumes after a failure; None if it did not fail or there is nothing to save."""
        return self._saves_at if self._to_save and self._saves_at > now else None

    def ended(self, job: Job, checksums: Sequence[bytes], now: float) -> None:
        """Apply the result of a job: the checksum of each block, empty for a block that was not copied."""
        if job.kind is JobKind.LOAD:
            self._loaded(job, checksums)
        else:
            self._saved(job, checksums, now)

    def take_events(self) -> list[KvEvent]:
        memory = [msgspec.structs.replace(event, tier=KvTier.HOST) for event in self.memory.take_events()]
        return [*memory, *self.files.take_events()]

    def whole_as_events(self) -> list[KvEvent]:
        held = ((KvTier.HOST, self.memory.hashes()), (KvTier.DISK, self.files.names()))
        stored = [
            KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes(map(block_hash64, names)), tier=tier)
            for tier, names in held
        ]
        return [KvEvent(kind=KvEventKind.CLEARED), *stored]

    def _next_load(self) -> Job | None:
        names: list[bytes] = []
        slots: list[int] = []
        while self._to_load and len(names) < min(self._job_blocks_max, self.memory.free):
            name = next(iter(self._to_load))
            del self._to_load[name]
            slot = self.files.slot_of(name)
            if slot is not None and self.memory.block_of(name) is None:
                names.append(name)
                slots.append(slot)
        if not names:
            return None
        blocks = self.memory.take(len(names)) or []
        self.files.hold(slots)
        self._loading.update(names)
        return Job(JobKind.LOAD, tuple(names), tuple(blocks), tuple(slots))

    def _next_save(self) -> Job | None:
        names: list[bytes] = []
        blocks: list[int] = []
        while self._to_save and len(names) < min(self._job_blocks_max, self.files.slots):
            name = next(iter(self._to_save))
            del self._to_save[name]
            block = self.memory.block_of(name)
            if block is not None and self.files.slot_of(name) is None:
                names.append(name)
                blocks.append(block)
        slots = self.files.take(len(names))
        if not slots:
            return None
        del names[len(slots) :], blocks[len(slots) :]
        self.memory.hold(blocks)
        return Job(JobKind.SAVE, tuple(names), tuple(blocks), tuple(slots))

    def _loaded(self, job: Job, checksums: Sequence[bytes]) -> None:
        for name, block, slot, checksum in zip(job.names, job.blocks, job.slots, checksums, strict=True):
            self._loading.discard(name)
            if self.files.slot_of(name) != slot or checksum != self.files.checksum_of(name):
                self.files.drop(name)
                self.counts.damaged += 1
            else:
                self.memory.name(block, name, None)
                self.counts.loaded += 1
        self.memory.release(job.blocks)
        self.files.release(job.slots)

    def _saved(self, job: Job, checksums: Sequence[bytes], now: float) -> None:
        for name, slot, checksum in zip(job.names, job.slots, checksums, strict=True):
            if checksum:
                self.files.put(name, slot, checksum)
                self.counts.saved += 1
            else:
                self.files.give_back([slot])
                self._saves_at = now + SAVE_AGAIN_S
                self.counts.unsaved += 1
        self.memory.release(job.blocks)

    def is_coming(self, name: bytes) -> bool:
        """Whether it is being loaded or queued for loading."""
        return name in self._loading or name in self._to_load

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of blocks to load, and to save."""
        return len(self._to_load) + len(self._loading), len(self._to_save)

    def _apart(self, numbers: Iterable[int]) -> tuple[list[int], list[int]]:
        """Split numbers into blocks of memory and slots of the file."""
        blocks: list[int] = []
        slots: list[int] = []
        for number in numbers:
            if number < self.memory.blocks:
                blocks.append(number)
            else:
                slots.append(number - self.memory.blocks)
        return blocks, slots
