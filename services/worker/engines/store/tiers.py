"""A store's blocks in memory and in the tiers below: files, and objects of an object store.

Other workers read memory only. Blocks that arrive in memory are saved to each tier below soon after. Requested blocks
that memory lacks are loaded into it from the fastest tier that has them. Loads and saves are jobs of a few blocks each;
loads come first.

Blocks of all KV cache groups share memory and tiers, each under its own name (see ``records.name_in``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, islice, takewhile

from connector.groups import Blocks, GroupPlan
from connector.reader.prefetch import FREE_SHARE_MIN, Held
from services.worker.engines.simulated.core.block_cache import Change
from services.worker.engines.store.port import StoreMemory
from services.worker.engines.store.records import group_of, name_in
from services.worker.engines.store.slots import FileTier, ObjectTier
from services.worker.kv_events import EventTranslation, narrow_windows
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier
from shared.contracts.kv_exchange import KvGroupKind


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
GATHER_S = 2.0
"""How long blocks wait for others of their object."""
LOAD_AGAIN_S = 10.0
"""Pause after a failed load from a tier on another machine."""


class JobKind(Enum):
    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Job:
    """Copy each named block between its block of memory and its slot below. The result is their checksums."""

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


class Below:
    """A tier below memory: its slots, and what waits to be copied to and from them. One job of it runs at a time."""

    def __init__(
        self,
        kv_tier: KvTier,
        slots: FileTier,
        memory: StoreMemory,
        job_blocks_max: int,
        *,
        may_return: bool = False,
        gather_s: float = 0.0,
    ) -> None:
        """``may_return``: blocks that could not be read may be readable later, as the tier is on another machine.
        ``gather_s``: how long fewer blocks than a job takes wait for more.
        """
        self._gather_s = gather_s
        self.kv_tier = kv_tier
        self.slots = slots
        self.counts = Counts()
        self._memory = memory
        self._job_blocks_max = job_blocks_max
        self._may_return = may_return
        self.to_load: dict[bytes, None] = {}
        self.to_save: dict[bytes, None] = {}
        """Names of blocks to save, in order of arrival, at most as many as memory has blocks. Blocks evicted before
        their save are not saved."""
        self.loading: set[bytes] = set()
        self._saves_at = self._failed_until = 0.0
        self._loads_at = 0.0
        self.silent_since: float | None = None
        """When the first of the calls failed that have all failed since."""

    def holds(self, name: bytes, now: float) -> bool:
        """Whether it can be loaded, as far as is known."""
        return now >= self._loads_at and self.slots.slot_of(name) is not None

    def save(self, names: Iterable[bytes], now: float) -> None:
        """Queue these for saving."""
        if self.slots.slots:
            if not self.to_save:
                self._saves_at = max(self._saves_at, now + self._gather_s)
            self.to_save.update(dict.fromkeys(names))
            while len(self.to_save) > self._memory.blocks:
                del self.to_save[next(iter(self.to_save))]

    def load(self, name: bytes) -> None:
        """Queue it for loading."""
        if name not in self.loading:
            self.to_load[name] = None

    def next_job(self, now: float) -> Job | None:
        """Loads come first."""
        is_full = self._gather_s and len(self.to_save) >= self._job_blocks_max and now >= self._failed_until
        return self._next_load() or (self._next_save() if is_full or now >= self._saves_at else None)

    def saves_at(self, now: float) -> float | None:
        """When saving resumes after a failure; None if it did not fail or there is nothing to save."""
        return self._saves_at if self.to_save and self._saves_at > now else None

    def ended(self, job: Job, checksums: Sequence[bytes], now: float) -> None:
        if any(checksums):
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = now
        if job.kind is JobKind.LOAD:
            self._loaded(job, checksums, now)
        else:
            self._saved(job, checksums, now)

    def _next_load(self) -> Job | None:
        names: list[bytes] = []
        slots: list[int] = []
        while self.to_load and len(names) < min(self._job_blocks_max, self._memory.free):
            name = next(iter(self.to_load))
            del self.to_load[name]
            slot = self.slots.slot_of(name)
            if slot is not None and self._memory.block_of(name) is None:
                names.append(name)
                slots.append(slot)
        if not names:
            return None
        blocks = self._memory.take(len(names)) or []
        self.slots.hold(slots)
        self.loading.update(names)
        return Job(JobKind.LOAD, tuple(names), tuple(blocks), tuple(slots))

    def _next_save(self) -> Job | None:
        names: list[bytes] = []
        blocks: list[int] = []
        while self.to_save and len(names) < min(self._job_blocks_max, self.slots.slots):
            name = next(iter(self.to_save))
            del self.to_save[name]
            block = self._memory.block_of(name)
            if block is not None and self.slots.slot_of(name) is None:
                names.append(name)
                blocks.append(block)
        slots = self.slots.take(len(names))
        if not slots:
            return None
        del names[len(slots) :], blocks[len(slots) :]
        self._memory.hold(blocks)
        return Job(JobKind.SAVE, tuple(names), tuple(blocks), tuple(slots))

    def _loaded(self, job: Job, checksums: Sequence[bytes], now: float) -> None:
        for name, block, slot, checksum in zip(job.names, job.blocks, job.slots, checksums, strict=True):
            self.loading.discard(name)
            if self.slots.slot_of(name) == slot and checksum == self.slots.checksum_of(name):
                self._memory.name(block, name, None)
                self.counts.loaded += 1
            elif self._may_return and not checksum:
                self._loads_at = now + LOAD_AGAIN_S
                self.to_load.clear()
            else:
                self.slots.drop(name)
                self.counts.damaged += 1
        self._memory.release(job.blocks)
        self.slots.release(job.slots)

    def _saved(self, job: Job, checksums: Sequence[bytes], now: float) -> None:
        for name, slot, checksum in zip(job.names, job.slots, checksums, strict=True):
            if checksum:
                self.slots.put(name, slot, checksum)
                self.counts.saved += 1
            else:
                self.slots.give_back([slot])
                self._saves_at = self._failed_until = now + SAVE_AGAIN_S
                self.counts.unsaved += 1
        self._memory.release(job.blocks)


class Tiers:
    """A ``connector.reader.prefetch.BlockAllocator``. Slots of files, and then those of objects, are numbered after the
    blocks of memory.
    """

    def __init__(
        self,
        memory: StoreMemory,
        files: FileTier,
        job_blocks_max: int,
        plan: GroupPlan,
        objects: ObjectTier | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.memory = memory
        self.files = files
        self.plan = plan
        self._now = now
        self.below = [Below(KvTier.DISK, files, memory, job_blocks_max)]
        """The fastest first."""
        if objects is not None:
            self.below.append(
                Below(KvTier.OBJECT, objects, memory, objects.together, may_return=True, gather_s=GATHER_S)
            )
        self._events = StoreEvents(plan)

    @property
    def counts(self) -> Counts:
        """Sums over all tiers below memory."""
        each = [below.counts for below in self.below]
        return Counts(*(sum(getattr(one, name) for one in each) for name in ("loaded", "saved", "damaged", "unsaved")))

    @property
    def objects(self) -> Below | None:
        """The tier on another machine, if there is one."""
        return self.below[1] if len(self.below) > 1 else None

    @property
    def blocks(self) -> int:
        """Blocks of memory."""
        return self.memory.blocks

    @property
    def fetch_blocks_max(self) -> int:
        """All: a store has no requests to keep blocks for."""
        return self.memory.blocks + sum(below.slots.slots for below in self.below)

    def hold(self, hashes: Sequence[bytes]) -> Held:
        """Hold what any tier has of a prompt with these hashes."""
        found = self.find(hashes, self._is_kept)
        held: list[int] = []
        for name in found.names:
            if (block := self.memory.block_of(name)) is not None:
                self.memory.hold([block])
                held.append(block)
                continue
            before = self.memory.blocks
            for below in self.below:
                if (slot := below.slots.slot_of(name)) is not None:
                    below.slots.hold([slot])
                    held.append(before + slot)
                    break
                before += below.slots.slots
        unit = self.plan.unit
        return Held(found.full // unit, found.boundary // unit, held)

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
        now = self._now()
        return self.memory.block_of(name) is not None or any(below.holds(name, now) for below in self.below)

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
        now = self._now()
        for below in self.below:
            below.save(names, now)

    def free(self, blocks: Sequence[int]) -> None:
        """Release blocks from ``hold`` or ``allocate``."""
        self.memory.release([number for number in blocks if number < self.memory.blocks])
        before = self.memory.blocks
        for below in self.below:
            end = before + below.slots.slots
            below.slots.release([number - before for number in blocks if before <= number < end])
            before = end

    def requested(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note that a reader requests these. Returns the blocks to load first, as many as memory can take; of a model
        for which a part is of no use, all or none.
        """
        chain = self.find(hashes, self._is_kept).names
        missing = [name for name in chain if self.memory.block_of(name) is None]
        for below in self.below:
            below.slots.used(chain)
        if not missing:
            return []
        present = [block for block in map(self.memory.block_of, chain) if block is not None]
        self.memory.hold(present)  # Loading must not evict blocks of the same chain.
        loadable = self.memory.free
        self.memory.release(present)
        return missing[:loadable] if self.plan.keeps_prefix or len(missing) <= loadable else []

    def load(self, names: Iterable[bytes]) -> None:
        """Queue each for loading from the fastest tier that has it."""
        now = self._now()
        for name in names:
            below = next((below for below in self.below if below.holds(name, now)), None)
            if below is not None:
                below.load(name)

    def loads_with(self, names: Iterable[bytes]) -> list[int]:
        """How many blocks each tier loads, those that wait and these."""
        now = self._now()
        counts = [len(below.to_load) + len(below.loading) for below in self.below]
        for name in names:
            for number, below in enumerate(self.below):
                if below.holds(name, now):
                    counts[number] += 1
                    break
        return counts

    def next_job(self, now: float, below: int = 0) -> Job | None:
        """The next job of a tier, or None; ``ended`` must follow."""
        return self.below[below].next_job(now)

    def saves_at(self, now: float) -> float | None:
        """When saving resumes after a failure; None if none did or there is nothing to save."""
        return min((at for below in self.below if (at := below.saves_at(now)) is not None), default=None)

    def ended(self, job: Job, checksums: Sequence[bytes], now: float, below: int = 0) -> None:
        """Apply the result of a job: the checksum of each block, empty for a block that was not copied."""
        self.below[below].ended(job, checksums, now)
        if below and job.kind is JobKind.LOAD:
            self.below[0].save((name for name in job.names if self.memory.block_of(name) is not None), now)

    def take_events(self) -> list[KvEvent]:
        changes = [(KvTier.HOST, self.memory.take_changes())]
        changes += [(below.kv_tier, below.slots.take_changes()) for below in self.below]
        return [event for tier, changed in changes for event in self._events.of(tier, changed)]

    def whole_as_events(self) -> list[KvEvent]:
        held = [(KvTier.HOST, self.memory.hashes()), *((below.kv_tier, below.slots.names()) for below in self.below)]
        events = StoreEvents(self.plan)
        stored = (events.of(tier, [Change(KvEventKind.STORED, list(names))]) for tier, names in held)
        return [KvEvent(kind=KvEventKind.CLEARED), *(event for each in stored for event in each)]

    def is_coming(self, name: bytes) -> bool:
        """Whether it is being loaded or queued for loading."""
        return any(name in below.loading or name in below.to_load for below in self.below)

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of blocks to load, and to save."""
        loads = sum(len(below.to_load) + len(below.loading) for below in self.below)
        return loads, sum(len(below.to_save) for below in self.below)
