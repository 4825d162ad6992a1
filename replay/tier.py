"""A tier in host memory, in virtual time: a store on each host, which copies what engines are about to evict.

The decisions are the product's: what an engine offers (``offers.py``), what a round copies, in which pieces and in
which share of the time (``StoreCopies``), and what the store keeps (``Tiers``). Only links and messages are simulated.
``StoreCopies`` runs as in a worker; what it awaits are ``Wait``s, which events of the world end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from connector.groups import Blocks
from replay.offers import Offers, full_hash
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.simulated.core.groups import group_plan
from services.worker.engines.store.slots import FileTier
from services.worker.engines.store.tiers import Tiers
from services.worker.kv_exchange.prefix_copy import ROUND_S, StoreCopies, Waits
from services.worker.settings import Settings
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvEventBatch, block_hash64
from shared.contracts.kv_exchange import FetchedKv, FetchKv, unpack_full_hashes
from shared.contracts.load import LoadReport
from shared.contracts.workers import Role, WorkerRecord

if TYPE_CHECKING:
    from connector.groups import GroupPlan
    from connector.messages import Chain
    from connector.reader.prefetch import Held
    from replay.legs import At, Exchange
    from replay.profile import Profile
    from replay.simworker import SimWorker
    from shared.contracts.channels import AskChannel

MESSAGE_S = 0.001
"""One-way latency between a worker and a store."""


class Wait:
    """When it is awaited, ``begin(resume)`` is called; ``resume(now, value)`` ends the wait with that value."""

    def __init__(self, begin: Callable[[Callable[..., None]], None]) -> None:
        self.begin = begin

    def __await__(self) -> Generator[Wait, Any, Any]:
        return (yield self)


def drive(work: Coroutine[Any, Any, None], _now: float, value: Any = None) -> None:
    """Run a coroutine, which awaits only ``Wait``s, up to its next one; from there, when that has ended."""
    try:
        wait = work.send(value)
    except StopIteration:
        return
    wait.begin(partial(drive, work))


class VirtualWaits(Waits):
    """Waits of a worker in the world's time."""

    def __init__(self, at: At, now: Callable[[], float]) -> None:
        self._at = at
        self._now = now
        self.sleeping = 0
        """Sleeps that have not ended."""

    def now(self) -> float:
        return self._now()

    async def sleep(self, seconds: float) -> None:
        self.sleeping += 1
        await Wait(partial(self._at, self._now() + seconds))
        self.sleeping -= 1

    async def all_of(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """One after another: they are questions of milliseconds."""
        for work in works:
            await work


class SimStore:
    """The store of one host, without files."""

    def __init__(self, record: WorkerRecord, profile: Profile, memory_bytes: int) -> None:
        """``record``: of a worker of this host."""
        blocks = memory_bytes // (profile.block_tokens * profile.kv_bytes_per_token)
        if blocks < 1:
            raise ValueError("the host memory has no room for a block of KV")
        self.record = msgspec.structs.replace(
            record, worker_id=WorkerId(f"store-{record.host}"), role=Role.STORE, kv_tokens=blocks * profile.block_tokens
        )
        self._memory = BlockCache(blocks)
        self.tiers = Tiers(self._memory, FileTier(0), 1, group_plan("full", profile.block_tokens))
        self.learns = False
        self.due_at = -math.inf
        self._seq = 0

    @property
    def worker_id(self) -> WorkerId:
        return self.record.worker_id

    @property
    def host(self) -> str:
        return self.record.host

    def report(self, sent_by: float) -> tuple[LoadReport, float] | None:
        """Its first load report; later ones would tell routers nothing else."""
        if self.due_at == math.inf:
            return None
        self.due_at = math.inf
        of = self.record
        return LoadReport(worker_id=of.worker_id, epoch=of.epoch, role=of.role, phase=of.phase), sent_by

    def kv_events(self) -> KvEventBatch | None:
        """KV events since the last call."""
        events = self.tiers.take_events()
        if not events:
            return None
        self._seq += 1
        return KvEventBatch(worker_id=self.worker_id, epoch=self.record.epoch, seq=self._seq, events=events)

    def lend(self, chain: Sequence[int], first: int, limit: int) -> list[int]:
        """Hold what it has of a chain from block ``first`` to before ``limit``, if it has all blocks before them."""
        blocks = self._memory.find([full_hash(name) for name in chain[:limit]], limit)[first:]
        self.tiers.memory.hold(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """End a loan."""
        self.tiers.memory.release(blocks)


class Copying:
    """The copies of one worker's blocks to stores: what ``StoreCopies`` knows of its engine and of the bus."""

    def __init__(self, tier: Tier, worker: SimWorker, offers: Offers) -> None:
        self._tier = tier
        self._worker = worker
        self._offers = offers
        self.groups: GroupPlan = group_plan("full", worker.engine.profile.block_tokens)
        self.records = [store.record for store in tier.stores.values()]
        self.copied_blocks = 0
        self.lost_blocks = 0
        """Blocks that the engine evicted before a store had copied them."""
        self._copies = StoreCopies(self, self, lambda: worker.record, Settings(), tier.waits)

    def begin(self, now: float) -> None:
        """Begin the rounds."""
        drive(self._copies.follow(), now)

    async def chains_for_store(
        self, chains_max: int, *, uses_min: int, idle_s_max: float, blocks_min: int
    ) -> tuple[list[Chain], int]:
        """The engine's answer."""
        hot, now = self._offers.hot, self._tier.waits.now()
        chains = hot.for_store(
            chains_max,
            now,
            uses_min=uses_min,
            idle_s_max=idle_s_max,
            evicted_next=self._offers.evicted_next,
            blocks_min=blocks_min,
        )
        return chains, hot.take_lost()

    def note_copies(self, copied: int, lost: int) -> None:
        self.copied_blocks += copied
        self.lost_blocks += lost

    async def ask(self, _channel: AskChannel[FetchKv, FetchedKv], message: FetchKv, *, timeout_s: float) -> FetchedKv:
        """The store's answer; nothing here takes as long as ``timeout_s``."""
        del timeout_s
        result: FetchedKv = await Wait(partial(self._send, message))
        return result

    def _send(self, order: FetchKv, resume: Callable[..., None]) -> None:
        self._tier.at(self._tier.waits.now() + MESSAGE_S, self._begins, order, resume)

    def _begins(self, now: float, order: FetchKv, resume: Callable[..., None]) -> None:
        store, hashes = self._tier.stores[order.worker_id], unpack_full_hashes(order.hashes)
        held = store.tiers.hold(hashes)
        if order.sources and held.boundary < len(hashes):
            self._tier.at(now + self._worker.engine.profile.ask_s, self._leased, store, hashes, held, resume)
        else:
            store.release(held.blocks)
            self._tier.at(now + MESSAGE_S, resume, FetchedKv(held=held.boundary))

    def _leased(
        self, now: float, store: SimStore, hashes: list[bytes], held: Held, resume: Callable[..., None]
    ) -> None:
        """The engine grants what it has of the blocks that the store lacks, and the store reads it."""
        pool, wanted = self._worker.engine.pool, [block_hash64(block) for block in hashes[held.boundary :]]
        granted = pool.depth(wanted, len(wanted))
        taken = Blocks(0, held.boundary, store.tiers.allocate(granted) if granted else [])
        pinned = wanted[: len(taken.ids)]
        self._worker.changes(now)
        pool.hold(pinned)
        arrives_at = self._worker.copy_out(len(pinned) * self.groups.unit, now) if pinned else now
        self._tier.at(arrives_at, self._arrived, store, hashes, held, taken, resume)

    def _arrived(
        self, now: float, store: SimStore, hashes: list[bytes], held: Held, taken: Blocks, resume: Callable[..., None]
    ) -> None:
        if taken.ids:
            store.tiers.cache(hashes, taken, taken.end * self.groups.unit)
            self._tier.exchange.unpin(
                self._worker, [block_hash64(block) for block in hashes[taken.first : taken.end]], now
            )
        store.release([*held.blocks, *taken.ids])
        self._tier.changed(store, now)
        self._tier.at(now + MESSAGE_S, resume, FetchedKv(held=held.boundary, fetched=len(taken.ids)))


class Tier:
    """The stores of a world, and its workers' copies to them."""

    def __init__(
        self,
        workers: Sequence[SimWorker],
        memory_bytes: int,
        at: At,
        now: Callable[[], float],
        exchange: Exchange,
        changed: Callable[[SimStore, float], None],
    ) -> None:
        """``memory_bytes``: of each host. ``changed``: tells routers of a store's changes."""
        self.at = at
        self.exchange = exchange
        self.changed = changed
        self.waits = VirtualWaits(at, now)
        hosts = {worker.record.host: worker for worker in reversed(workers)}
        made = [SimStore(one.record, one.engine.profile, memory_bytes) for one in reversed(hosts.values())]
        self.stores = {store.worker_id: store for store in made}
        self.copying = [Copying(self, worker, worker.offers) for worker in workers if worker.offers is not None]

    @property
    def sleeping(self) -> int:
        """Events that begin a round, or go on with one after a pause."""
        return self.waits.sleeping

    def begin(self) -> None:
        """Begin the rounds of all workers, spread over the time between two."""
        for number, copying in enumerate(self.copying):
            self.at(ROUND_S * number / len(self.copying), copying.begin)
