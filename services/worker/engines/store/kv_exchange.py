"""A store's end of the KV exchange: the connector's own parts around two tiers of blocks, with no engine behind them.

What is asked for and lies in files alone is loaded before the ask is answered, as much as can be loaded in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, EngineNotification, Orders, Results
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from services.worker.engines.simulated.core.block_pool import LeasablePool
from services.worker.engines.store.tiers import Job, Tiers
from shared.contracts.kv_exchange import KvHandshake, LeaseKv, ReleaseKv, unpack_block_ids, unpack_full_hashes
from shared.contracts.load import StoreState

LOOK_S = 0.05
"""While something is fetched or followed, how often to look whether its time is over."""
LOAD_S_MAX = 0.3
"""How long an ask waits for its blocks to be loaded: readers wait for half a second."""
LEASES_WAITING_MAX = 256
"""Asks that wait for files; one more is answered with what is in memory."""


@dataclass(slots=True)
class _Waiting:
    lease: LeaseKv
    names: list[bytes]
    until: float


class StoreExchange:
    """See the module. ``now`` is the store's clock."""

    def __init__(self, holding: HolderSettings, block_tokens: int, tiers: Tiers, now: Callable[[], float]) -> None:
        self.tiers = tiers
        self._now = now
        self._core = ExchangeCore(holding, block_tokens, FetchLimits(), now)
        self._core.bind(LeasablePool(tiers.memory), tiers)
        self._waiting: list[_Waiting] = []
        self._granted_blocks = 0

    def describe(self, handshake: KvHandshake) -> None:
        """The memory is registered; this is what others need to read it."""
        self._core.handshake = handshake

    def call(self, call: EngineCall) -> EngineNotification:
        """Do what the worker asks."""
        for release in call.releases:
            self._unwanted(release)
        ready = [lease for lease in call.leases if not self._waits(lease)]
        self._core.handle(msgspec.structs.replace(call, leases=ready))
        self.look()
        return self._noted(self._core.notifications(describe=call.describe))

    def look(self) -> None:
        """End what is over, and answer what can be answered: after whatever happened, and when it wants to be woken."""
        now = self._now()
        due = [one for one in self._waiting if now >= one.until or not any(map(self.tiers.is_coming, one.names))]
        if due:
            self._waiting = [one for one in self._waiting if one not in due]
            self._core.handle(EngineCall(leases=[one.lease for one in due]))
        self._core.grant()
        self._core.on_time()
        outbox, orders = self._core.reader.outbox, self._core.orders
        orders.reads += outbox.reads
        orders.cancel += outbox.cancel
        outbox.reads, outbox.cancel = [], []

    def wakes_at(self) -> float | None:
        """When to look again."""
        core = self._core
        looks = not core.prefetcher.idle or core.holder.has_followed
        now, expiry_s = self._now(), core.holder.counts.next_expiry_s or None
        times = [expiry_s, now + LOOK_S if looks else None, self.tiers.saves_at(now)]
        times += [one.until for one in self._waiting]
        return min((at for at in times if at is not None), default=None)

    def take_orders(self) -> Orders:
        """For the mover."""
        orders, self._core.orders = self._core.orders, Orders()
        return orders

    def results(self, results: Results) -> None:
        """Handle the mover's results."""
        self._core.on_connected(results.connected)
        for part in results.parts:
            self._core.on_part(part)

    def next_job(self) -> Job | None:
        """The next job between memory and files, if there is one."""
        return self.tiers.next_job(self._now())

    def ended(self, job: Job, checksums: list[bytes]) -> None:
        """The job has ended."""
        self.tiers.ended(job, checksums, self._now())

    @property
    def moving(self) -> bool:
        """Whether the mover has something that is not over."""
        return bool(self._core.connecting) or not self._core.prefetcher.idle

    def take_notifications(self) -> EngineNotification | None:
        """For the worker, if there is any."""
        return self._noted(self._core.notifications()) if self._core.has_notifications else None

    def state(self, block_bytes: int, disk_free_bytes: int = -1) -> StoreState:
        """What it keeps and has done; ``block_bytes`` is what a block takes."""
        tiers, counts = self.tiers, self.tiers.counts
        loads_waiting, saves_waiting = tiers.waiting
        return StoreState(
            block_bytes=block_bytes,
            host_blocks=tiers.memory.named,
            disk_blocks=len(tiers.files),
            disk_blocks_max=tiers.files.slots,
            disk_free_bytes=disk_free_bytes,
            loads_waiting=loads_waiting,
            saves_waiting=saves_waiting,
            loaded_blocks_total=counts.loaded,
            saved_blocks_total=counts.saved,
            damaged_blocks_total=counts.damaged,
            unsaved_blocks_total=counts.unsaved,
            evicted_host_blocks_total=tiers.memory.evicted_total,
            evicted_disk_blocks_total=tiers.files.evicted_total,
            granted_bytes_total=self._granted_blocks * block_bytes,
        )

    def _noted(self, notifications: EngineNotification) -> EngineNotification:
        self._granted_blocks += sum(len(unpack_block_ids(grant.block_ids)) for grant in notifications.grants)
        return notifications

    def _waits(self, lease: LeaseKv) -> bool:
        missing = self.tiers.asked_for(unpack_full_hashes(lease.hashes))
        if not missing or len(self._waiting) >= LEASES_WAITING_MAX:
            return False
        self.tiers.load(missing)
        self._waiting.append(_Waiting(lease, missing, self._now() + LOAD_S_MAX))
        return True

    def _unwanted(self, release: ReleaseKv) -> None:
        self._waiting = [
            one
            for one in self._waiting
            if one.lease.ask_id not in release.ask_ids or one.lease.reader_id != release.reader_id
        ]
