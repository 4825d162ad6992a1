"""A store's end of the KV exchange: the connector's scheduler side on top of two tiers of blocks, without an engine.

Requested blocks that are only in files are loaded before the lease is granted, as long as files deliver and the reader
allows. A store that is loading says so, because a reader that hears nothing for half a second asks elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from connector.holder.boundaries import Part
from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, EngineNotification, Orders, Results
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from services.worker.engines.simulated.core.block_cache import NumberedBlock
from services.worker.engines.store.records import name_in
from services.worker.engines.store.tiers import Job, JobKind, Tiers
from shared.contracts.kv_exchange import KvHandshake, LeaseKv, ReleaseKv, blocks_in, unpack_full_hashes
from shared.contracts.load import StoreState

POLL_S = 0.05
"""Interval at which deadlines are checked while a fetch runs or a prompt is followed."""
LOAD_S_MAX = 0.3
"""How long a lease request waits for the next of its blocks to be loaded. Readers wait for half a second."""
STILL_S_MAX = 1.0
"""How long a reader that is told of coming blocks waits for the next: jobs that save may be under way before."""
LOADS_S_MAX = 10.0
"""Maximum of ``LeaseKv.load_s``."""
SPEED_SHARE = 0.3
"""Part that the newest load has in the speed of loading."""
SPEED_S_MAX = 30.0
"""Age at which a speed counts as unknown, so that a disk that was slow is tried again."""
COMING_S = 0.2
"""Interval at which a reader is told that blocks are coming."""
LEASES_WAITING_MAX = 256
"""Lease requests that may wait for files; further ones are granted what is in memory."""


@dataclass(slots=True)
class _Waiting:
    lease: LeaseKv
    names: list[bytes]
    still_s: float
    """How long files may stand still."""
    until: float
    last: float
    """``until`` goes no further."""
    told: float
    """When the reader was told, or asked."""


@dataclass(slots=True)
class LoadSpeed:
    """How fast blocks are loaded."""

    begun_at: float = 0.0
    """When the job that runs began."""
    _block_s: float = 0.0
    _measured_at: float = -inf

    def loaded(self, blocks: int, now: float) -> None:
        """The job has loaded so many."""
        before_s = self.block_s(now)
        block_s = (now - self.begun_at) / blocks
        self._block_s = before_s + SPEED_SHARE * (block_s - before_s) if before_s else block_s
        self._measured_at = now

    def block_s(self, now: float) -> float:
        """Seconds for a block; 0 if that is not known."""
        return self._block_s if now < self._measured_at + SPEED_S_MAX else 0.0


class StorePool:
    """The blocks in memory as a ``connector.holder.holder.Pool``. They are not written while they have a name."""

    def __init__(self, tiers: Tiers) -> None:
        self.blocks: Sequence[NumberedBlock] = [NumberedBlock(number) for number in range(tiers.memory.blocks)]
        self.enable_caching = True
        self._tiers = tiers
        self._block_of = tiers.memory.block_of

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[NumberedBlock] | None:
        """The blocks of these groups, or None if one is not in memory."""
        found: list[NumberedBlock] = []
        for group in groups:
            block = self._block_of(name_in(block_hash, group) if group else block_hash)
            if block is None:
                return None
            found.append(self.blocks[block])
        return found

    def find_boundary(self, hashes: list[bytes], tokens: int) -> tuple[list[Part], int]:
        """See ``connector.holder.boundaries.FindBoundary``."""
        memory, plan = self._tiers.memory, self._tiers.plan
        found = self._tiers.find(hashes[: tokens // plan.unit], lambda name: memory.block_of(name) is not None)
        if not found.boundary:
            return [], 0
        parts = []
        for number in range(len(plan.groups)):
            needed = plan.needed(number, 0, found.boundary)
            names = (name_in(plan.name_of(hashes, number, index, found.boundary), number) for index in needed)
            blocks = [self.blocks[block] for block in map(memory.block_of, names) if block is not None]
            parts.append(Part(needed.start, blocks))
        return parts, found.boundary

    def touch(self, blocks: Sequence[NumberedBlock]) -> None:
        self._tiers.memory.hold([block.block_id for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[NumberedBlock]) -> None:
        """Remove one hold from each block; the first block is evicted first."""
        ordered = [block.block_id for block in ordered_blocks]
        self._tiers.memory.release(ordered[::-1])


class StoreExchange:
    """``now`` returns the time on the store's clock."""

    def __init__(self, holding: HolderSettings, tiers: Tiers, now: Callable[[], float]) -> None:
        self.tiers = tiers
        self._now = now
        self._core = ExchangeCore(holding, tiers.plan, FetchLimits(), now)
        pool = StorePool(tiers)
        self._core.bind(pool, tiers, pool.find_boundary)
        self._waiting: list[_Waiting] = []
        self._speeds = [LoadSpeed() for _below in tiers.below]
        self._granted_blocks = 0

    def describe(self, handshake: KvHandshake) -> None:
        """Set the handshake that peers need to read the memory, which must be registered already."""
        self._core.describe(handshake)

    def call(self, call: EngineCall) -> EngineNotification:
        """Execute a call of the worker and return its immediate results."""
        for release in call.releases:
            self._drop_waiting(release)
        ready = [lease for lease in call.leases if not self._waits(lease)]
        self._core.handle(msgspec.structs.replace(call, leases=ready))
        self.poll()
        return self._count_grants(self._core.notifications(describe=call.describe))

    def poll(self) -> None:
        """Grant the leases that are ready and end what has expired. Call it after each change and at ``wakes_at``."""
        now = self._now()
        due = [one for one in self._waiting if now >= one.until or not any(map(self.tiers.is_coming, one.names))]
        if due:
            self._waiting = [one for one in self._waiting if one not in due]
            self._core.handle(EngineCall(leases=[one.lease for one in due]))
        self._say_coming(now)
        self._core.grant()
        self._core.on_time()
        outbox, orders = self._core.reader.outbox, self._core.orders
        orders.reads += outbox.reads
        orders.cancel += outbox.cancel
        outbox.reads, outbox.cancel = [], []

    def wakes_at(self) -> float | None:
        core = self._core
        polls = core.works_without_request or core.holder.has_followed
        now, expiry_s = self._now(), core.holder.counts.next_expiry_s or None
        times = [expiry_s, now + POLL_S if polls else None, self.tiers.saves_at(now)]
        times += [min(one.until, one.told + COMING_S) if one.lease.load_s else one.until for one in self._waiting]
        return min((at for at in times if at is not None), default=None)

    def take_orders(self) -> Orders:
        orders, self._core.orders = self._core.orders, Orders()
        return orders

    def results(self, results: Results) -> None:
        self._core.on_connected(results.connected)
        for part in results.parts:
            self._core.on_part(part)

    def next_job(self, below: int = 0) -> Job | None:
        """The next job between memory and a tier below; ``ended`` must follow."""
        now = self._now()
        self._speeds[below].begun_at = now
        return self.tiers.next_job(now, below)

    def ended(self, job: Job, checksums: list[bytes], below: int = 0) -> None:
        now = self._now()
        self.tiers.ended(job, checksums, now, below)
        if job.kind is JobKind.LOAD and any(checksums):
            self._speeds[below].loaded(len(job.names), now)
            for one in self._waiting:
                one.until = max(one.until, min(now + one.still_s, one.last))

    def take_notifications(self) -> EngineNotification | None:
        return self._count_grants(self._core.notifications()) if self._core.has_notifications else None

    def state(self, block_bytes: int, disk_free_bytes: int = -1) -> StoreState:
        """The store's part of the load report."""
        tiers, counts = self.tiers, self.tiers.counts
        loads_waiting, saves_waiting = tiers.waiting
        objects = tiers.objects
        return StoreState(
            block_bytes=block_bytes,
            host_blocks=tiers.memory.named,
            host_blocks_max=tiers.memory.blocks,
            disk_blocks=len(tiers.files),
            disk_blocks_max=tiers.files.slots,
            disk_free_bytes=disk_free_bytes,
            object_blocks=len(objects.slots) if objects else 0,
            object_blocks_max=objects.slots.slots if objects else 0,
            objects_silent_s=self._now() - objects.silent_since if objects and objects.silent_since else 0.0,
            loads_waiting=loads_waiting,
            saves_waiting=saves_waiting,
            loaded_blocks_total=counts.loaded,
            saved_blocks_total=counts.saved,
            damaged_blocks_total=counts.damaged,
            unsaved_blocks_total=counts.unsaved,
            evicted_host_blocks_total=tiers.memory.evicted_total,
            evicted_disk_blocks_total=tiers.files.evicted_total,
            evicted_object_blocks_total=objects.slots.evicted_total if objects else 0,
            granted_bytes_total=self._granted_blocks * block_bytes,
        )

    def _count_grants(self, notifications: EngineNotification) -> EngineNotification:
        self._granted_blocks += sum(blocks_in(grant.groups) for grant in notifications.grants)
        return notifications

    def _waits(self, lease: LeaseKv) -> bool:
        missing = self.tiers.requested(unpack_full_hashes(lease.hashes))
        if not missing or len(self._waiting) >= LEASES_WAITING_MAX:
            return False
        now = self._now()
        load_s = min(lease.load_s, LOADS_S_MAX) if lease.load_s > 0.0 else LOAD_S_MAX
        if lease.load_s and self._loading_s(missing, now) > load_s:
            return False  # The reader has computed them sooner.
        self.tiers.load(missing)
        still_s = min(STILL_S_MAX if lease.load_s else LOAD_S_MAX, load_s)
        self._waiting.append(_Waiting(lease, missing, still_s, now + still_s, now + load_s, now))
        return True

    def _loading_s(self, names: Sequence[bytes], now: float) -> float:
        """What loading these is expected to take, after what waits already; tiers load beside each other."""
        counts = self.tiers.loads_with(names)
        return max(speed.block_s(now) * count for speed, count in zip(self._speeds, counts, strict=True))

    def _say_coming(self, now: float) -> None:
        """Tell the readers that wait."""
        for one in self._waiting:
            if one.lease.load_s and now >= one.told + COMING_S:
                one.told = now
                self._core.say_coming(one.lease)

    def _drop_waiting(self, release: ReleaseKv) -> None:
        self._waiting = [
            one
            for one in self._waiting
            if one.lease.ask_id not in release.ask_ids or one.lease.reader_id != release.reader_id
        ]
