"""A store's blocks in memory and in files.

Other workers read memory only. Blocks that arrive in memory are saved to files soon after. Requested blocks that are
only in files are loaded into memory. Loads and saves are jobs of a few blocks each; loads come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from services.worker.engines.simulated.core.block_cache import BlockCache, CacheBlockAllocator
from services.worker.engines.store.file_tier import FileTier
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, block_hash64, pack_hashes

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
        """In order of arrival, at most as many as memory has blocks. Blocks evicted before their save are not saved."""
        self._loading: set[bytes] = set()
        self._saves_at = 0.0
        self.counts = Counts()

    @property
    def fetch_blocks_max(self) -> int:
        """All: a store has no requests to keep blocks for."""
        return self.memory.blocks + self.files.slots

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
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
        return held

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks of memory for new content."""
        return self._allocator.allocate(count)

    def cache(self, hashes: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """Make arrived blocks readable to others and queue them for saving."""
        self._allocator.cache(hashes, first, blocks)
        if self.files.slots:
            self._to_save.update(dict.fromkeys(hashes[first : first + len(blocks)]))
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
        """Changes since the last call."""
        memory = [msgspec.structs.replace(event, tier=KvTier.HOST) for event in self.memory.take_events()]
        return [*memory, *self.files.take_events()]

    def whole_as_events(self) -> list[KvEvent]:
        """Events that bring any reader to the present state."""
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
