"""Workers whose caches change all the time, and a router that hears of it over a real NATS: with production's own
publishers and feeds, and with a truth that both can be compared with, block by block.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from services.router.service import Router
from services.router.settings import Settings
from services.router.state.prefix_index import IndexState, PrefixIndex
from services.router.telemetry.tracing import Tracing
from services.worker.engines.port import EngineLoad
from services.worker.kv_events import CachePublisher, EventTranslation
from services.worker.lifecycle.registration import Registration
from services.worker.load_reports import LoadPublisher
from shared.bus.port import Bus, BusDown
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import MEMORIES, KvEvent, KvTier, block_hash64, unpack_hashes
from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.clock import SystemClock
from tests.integration.bus.worlds import NatsWorld, until
from tests.support.fleet_builders import record

CHAINS, CHAIN_BLOCKS = 40, 60
STEP_S = 0.003
SETTLE_S_MAX = 60.0
LOST_SHARE = 0.01
CANCELS_MAX = 5


async def end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancelled more than once: Python 3.11's ``wait_for``, which nats-py uses, may swallow one that comes just when
    what it waits for is done.
    """
    for _ in range(CANCELS_MAX):
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=1.0)
        if not tasks:
            return
    raise AssertionError(f"these do not end: {tasks}")


class LossyBus:
    """A bus on which a share of all KV events is never sent."""

    def __init__(self, bus: Bus, seed: str, share: float) -> None:
        self._bus = bus
        self._chance = random.Random(seed)
        self._share = share
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, channel: Any, message: Any, **more: Any) -> None:
        if channel is KV_EVENTS and self._chance.random() < self._share:
            self.lost += 1
        else:
            await self._bus.publish(channel, message, **more)


class CachingEngine:
    """Caches in all tiers, which fill and empty by chance; the copies of each block are the truth."""

    def __init__(self, seed: str, chains: list[list[bytes]]) -> None:
        self.copies: dict[KvTier, Counter[bytes]] = {tier: Counter() for tier in KvTier}
        self.told: asyncio.Queue[list[KvEvent]] = asyncio.Queue()
        self.facts = type("Facts", (), {"kv_tokens": 32_000})
        self._chance = random.Random(seed)
        self._chains = chains
        self._translation = EventTranslation([True, False])
        self._load_changed: Callable[[], None] = lambda: None

    def load(self) -> EngineLoad:
        return EngineLoad()

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        self._load_changed = listener

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        while True:
            yield await self.told.get()

    def held(self, tier: KvTier) -> set[int]:
        return {block_hash64(block) for block, copies in self.copies[tier].items() if copies > 0}

    def step(self) -> None:
        """Something is stored, evicted or, rarely, everything is forgotten."""
        chance = self._chance
        tier = chance.choice([KvTier.DEVICE, *KvTier])
        chain = chance.choice(self._chains)[: chance.randint(1, CHAIN_BLOCKS)]
        copies, deed = self.copies[tier], chance.random()
        where = (KvTier.DEVICE, 1) if tier is KvTier.BOUNDARY else (tier, 0)
        if deed < 0.005:
            self.copies = {each: Counter() for each in KvTier}
            events = [self._translation.cleared()]
        elif deed < 0.4:
            gone = [block for block in chain[len(chain) // 2 :] if copies[block] > 0]
            copies.subtract(gone)
            events = self._translation.removed(gone, *where)
        else:
            copies.update(chain)
            events = self._translation.stored(chain, None, *where)
        if events:
            self.told.put_nowait(events)
            self._load_changed()


class ToldWorker:
    """One life of a worker: everything it tells, told by production's own parts."""

    def __init__(self, bus: Bus, worker_id: str, epoch: int, chains: list[list[bytes]]) -> None:
        self.bus = bus
        self.worker_id, self.epoch = WorkerId(worker_id), Epoch(epoch)
        self.engine = CachingEngine(f"{worker_id} {epoch}", chains)
        self.cache = CachePublisher(bus, self.worker_id, self.epoch)
        self._tasks: list[asyncio.Task[Any]] = []

    async def begin(self) -> None:
        ids = {"worker_id": self.worker_id, "epoch": str(self.epoch)}
        await self.bus.answer(KV_SNAPSHOT, self.cache.answer, **ids)
        engine: Any = self.engine
        load = LoadPublisher(self.bus, self.worker_id, self.epoch, Role.BOTH, held=self.cache.held, engine=engine)
        registration = Registration(self.bus, record(self.worker_id, epoch=self.epoch))
        for work in (self.cache.follow(engine), load.publish(lambda: (WorkerPhase.READY, 0)), registration.follow()):
            self._tasks.append(asyncio.create_task(work))

    async def live(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            await asyncio.sleep(STEP_S)

    async def die(self) -> None:
        """Without a word, and what it held of the bus goes on: its snapshots are of a life that is over."""
        await end(set(self._tasks))


class ToldFleet:
    """Workers and a router; each of them may begin anew."""

    def __init__(self, world: NatsWorld, lost_share: float) -> None:
        chance = random.Random("chains")
        self.chains = [[chance.randbytes(32) for _ in range(CHAIN_BLOCKS)] for _ in range(CHAINS)]
        self.world = world
        self.workers: dict[str, ToldWorker] = {}
        self.buses: list[LossyBus] = []
        self._lost_share = lost_share
        self._router: AsyncExitStack | None = None
        self.router: Router

    @property
    def index(self) -> PrefixIndex:
        return self.router.fleet.index

    @property
    def lost(self) -> int:
        return sum(bus.lost for bus in self.buses)

    async def start_worker(self, worker_id: str, epoch: int = 1) -> None:
        """A worker, or a new life of one that holds nothing yet."""
        if before := self.workers.get(worker_id):
            await before.die()
        bus: Any = LossyBus(await self.world.bus(), f"{worker_id} {epoch}", self._lost_share)
        self.buses.append(bus)
        self.workers[worker_id] = ToldWorker(bus, worker_id, epoch, self.chains)
        await self.workers[worker_id].begin()

    async def start_router(self) -> None:
        """Another one, that knows nothing yet, in the place of the one before."""
        if self._router is not None:
            await self._router.aclose()
        self._router = AsyncExitStack()
        self.router = await self._router.enter_async_context(running_router(await self.world.bus()))

    async def live(self, steps: int) -> None:
        await asyncio.gather(*(worker.live(steps) for worker in self.workers.values()))

    def untrue(self) -> list[str]:
        """Every worker and tier of which the index says anything but the truth."""
        index = self.index
        wrong = [worker_id for worker_id in self.workers if index.state(WorkerId(worker_id)) is not IndexState.EXACT]
        for worker_id, worker in self.workers.items():
            for number, tier in enumerate(KvTier):
                slot = index.slot(WorkerId(worker_id))
                if slot < 0 or set(unpack_hashes(index.table.blocks(slot, number))) != worker.engine.held(tier):
                    wrong.append(f"{worker_id} {tier}")
        return wrong

    async def settled(self) -> None:
        """Until the index says the truth; fails when it does not in time."""
        try:
            await until(lambda: not self.untrue(), SETTLE_S_MAX)
        except TimeoutError:
            raise AssertionError(f"not true after {SETTLE_S_MAX:.0f} s: {self.untrue()}") from None

    def assert_matches_are_true(self) -> None:
        for chain in self.chains:
            hashes = [block_hash64(block) for block in chain]
            found = self.index.match(hashes)
            for worker_id, worker in self.workers.items():
                held = set[int]().union(*(worker.engine.held(tier) for tier in MEMORIES))
                depth = next((depth for depth, block in enumerate(hashes) if block not in held), len(hashes))
                assert found.get(WorkerId(worker_id), 0) == depth

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.die()
        if self._router is not None:
            await self._router.aclose()


@asynccontextmanager
async def running_router(bus: Bus) -> AsyncIterator[Router]:
    router = Router(Settings(log_requests=False, tokenize="never"), bus, SystemClock(), Tracing())
    await router.open()
    async with asyncio.TaskGroup() as tasks:
        before = asyncio.all_tasks()
        router.start(tasks)
        own = asyncio.all_tasks() - before
        try:
            yield router
        finally:
            with suppress(BusDown):
                await router.close()
            await end(own)
