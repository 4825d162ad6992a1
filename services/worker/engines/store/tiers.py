"""A store's blocks in memory and in files.

Other workers read memory only. Blocks that arrive in memory are saved to files soon after. Requested blocks that are
only in files are loaded into memory. Loads and saves are jobs of a few blocks each; loads come first.

Blocks of all KV cache groups share memory and files, each under its own name (see ``records.name_in``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, islice, takewhile

from connector.groups import Blocks, GroupPlan
from connector.reader.prefetch import FREE_SHARE_MIN, Held
from services.worker.engines.simulated.core.block_cache import Change
from services.worker.engines.store.port import StoreMemory
from services.worker.engines.store.records import SlotRecord, group_of, name_in
from services.worker.kv_events import EventTranslation, narrow_windows
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier
from shared.contracts.kv_exchange import KvGroupKind


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


class StoreEvents:
    """Tells routers of both tiers. To full attention the tiers are apart; a boundary may need blocks of both, so a
    block of the other groups counts in either.
    """

    def __init__(self, plan: GroupPlan) -> None:
        groups = [(group.block_size, group.kind is KvGroupKind.FULL, group.window) for group in plan.groups]
        self._translation = EventTranslation([is_full for _size, is_full, _window in groups], narrow_windows(groups))

    def of(self, tier: KvTier, changes: Iterable[Change]) -> Iterator[KvEvent]:
        for change in changes:
            for group, same in groupby(change.hashes, key=group_of):
                names = list(same)
                for told in (tier, KvTier.BOUNDARY):
                    if change.kind is KvEventKind.STORED:
                        yield from self._translation.stored(names, change.parent, told, group)
                    else:
                        yield from self._translation.removed(names, told, group)


@dataclass(frozen=True, slots=True)
class Found:
    """What a prompt can use of the blocks that are held, in tokens."""

    names: list[bytes]
    """Blocks of full attention, then those that the other groups need at the boundary."""
    full: int
    """The end of full attention."""
    boundary: int
    """A request can continue here."""


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

    def __init__(self, memory: StoreMemory, files: FileTier, job_blocks_max: int, plan: GroupPlan) -> None:
        self.memory = memory
        self.files = files
        self.plan = plan
        self._events = StoreEvents(plan)
        self._job_blocks_max = job_blocks_max
        self._to_load: dict[bytes, None] = {}
        self._to_save: dict[bytes, None] = {}
        """Names of blocks to save, in order of arrival, at most as many as memory has blocks. Blocks evicted before
        their save are not saved."""
        self._loading: set[bytes] = set()
        self._saves_at = 0.0
        self.counts = Counts()

    @property
    def blocks(self) -> int:
        """Blocks of memory."""
        return self.memory.blocks

    @property
    def fetch_blocks_max(self) -> int:
        """All: a store has no requests to keep blocks for."""
        return self.memory.blocks + self.files.slots

    def hold(self, hashes: Sequence[bytes]) -> Held:
        """Hold what is in memory or in files of a prompt with these hashes."""
        found = self.find(hashes, self._is_kept)
        blocks: list[int] = []
        slots: list[int] = []
        for name in found.names:
            if (block := self.memory.block_of(name)) is not None:
                blocks.append(block)
            elif (slot := self.files.slot_of(name)) is not None:
                slots.append(slot)
        self.memory.hold(blocks)
        self.files.hold(slots)
        unit = self.plan.unit
        return Held(
            found.full // unit, found.boundary // unit, [*blocks, *(self.memory.blocks + slot for slot in slots)]
        )

    def find(self, hashes: Sequence[bytes], is_held: Callable[[bytes], bool]) -> Found:
        """What a prompt with these hashes can use of the blocks for whose names ``is_held`` is true."""
        plan = self.plan
        runs: list[tuple[int, list[bytes]]] = []
        for number in plan.full:
            size = plan.groups[number].block_size
            each: Iterable[bytes] = islice(hashes, size // plan.unit - 1, None, size // plan.unit)
            if number:
                each = (name_in(block_hash, number) for block_hash in each)
            runs.append((size, list(takewhile(is_held, each))))
        full = min((size * len(run) for size, run in runs), default=0) // plan.stride * plan.stride
        names = [name for size, run in runs for name in run[: full // size]]
        if plan.keeps_prefix:
            return Found(names, full, full)
        boundary = plan.cut(len(hashes) * plan.unit)
        if plan.full:
            boundary = min(boundary, plan.cut(full + plan.stride))
        while boundary > 0:
            needed: list[bytes] = []
            for end, name in self._needed(hashes, full, boundary):
                if not is_held(name):
                    boundary = plan.cut(end - 1)  # Those between need the same block.
                    break
                needed.append(name)
            else:
                return Found([*names, *needed], full, boundary)
        return Found(names, full, 0)

    def _needed(self, hashes: Sequence[bytes], full: int, boundary: int) -> Iterator[tuple[int, bytes]]:
        """The end and the name of each block with which a prompt continues at the boundary, where full attention is
        held up to ``full``. Groups that need few come first.
        """
        plan = self.plan
        for number in sorted(range(len(plan.groups)), key=lambda number: plan.groups[number].window):
            size = plan.groups[number].block_size
            for index in plan.needed(number, full, boundary):
                end = min((index + 1) * size, boundary)
                yield end, name_in(plan.name_of(hashes, number, index, boundary), number)

    def _is_kept(self, name: bytes) -> bool:
        return self.memory.block_of(name) is not None or self.files.slot_of(name) is not None

    def evicted_next(self, _count: int) -> set[bytes]:
        """Nothing: no request uses a chain of a store, so it has none to offer."""
        return set()

    def evict_first(self, blocks: Sequence[int], names: set[bytes]) -> None:
        """Never called, as it offers nothing."""

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks of memory for new content. ``FREE_SHARE_MIN`` of all stays free for loads."""
        spare = self.memory.free - int(self.memory.blocks * FREE_SHARE_MIN)
        return self.memory.take(max(0, min(count, spare))) or []

    def cache(self, hashes: Sequence[bytes], blocks: Blocks, boundary: int) -> None:
        """Make arrived blocks readable to others and queue them for saving."""
        unit, group, before = self.plan.unit, blocks.group, max(0, blocks.first - 1)
        step = self.plan.groups[group].block_size // unit
        names = list(hashes[(before + 1) * step - 1 : min(boundary // unit, blocks.end * step) : step])
        if before + len(names) < blocks.end:
            names.append(hashes[boundary // unit - 1])
        if group:
            names = [name_in(block_hash, group) for block_hash in names]
        parent = names.pop(0) if blocks.first else None
        for name, block in zip(names, blocks.ids, strict=True):
            self.memory.name(block, name, parent)
            parent = name
        if self.files.slots:
            self._to_save.update(dict.fromkeys(names))
            while len(self._to_save) > self.memory.blocks:
                del self._to_save[next(iter(self._to_save))]

    def free(self, blocks: Sequence[int]) -> None:
        """Release blocks from ``hold`` or ``allocate``."""
        in_memory, slots = self._apart(blocks)
        self.memory.release(in_memory)
        self.files.release(slots)

    def requested(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note that a reader requests these. Returns the blocks to load first, as many as memory can take; of a model
        for which a part is of no use, all or none.
        """
        chain = self.find(hashes, self._is_kept).names
        missing = [name for name in chain if self.memory.block_of(name) is None]
        self.files.used(chain)
        if not missing:
            return []
        present = [block for block in map(self.memory.block_of, chain) if block is not None]
        self.memory.hold(present)  # Loading must not evict blocks of the same chain.
        loadable = self.memory.free
        self.memory.release(present)
        return missing[:loadable] if self.plan.keeps_prefix or len(missing) <= loadable else []

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
        memory, files = self.memory.take_changes(), self.files.take_changes()
        return [*self._events.of(KvTier.HOST, memory), *self._events.of(KvTier.DISK, files)]

    def whole_as_events(self) -> list[KvEvent]:
        held = ((KvTier.HOST, self.memory.hashes()), (KvTier.DISK, self.files.names()))
        events = StoreEvents(self.plan)
        stored = (events.of(tier, [Change(KvEventKind.STORED, list(names))]) for tier, names in held)
        return [KvEvent(kind=KvEventKind.CLEARED), *(event for each in stored for event in each)]

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
