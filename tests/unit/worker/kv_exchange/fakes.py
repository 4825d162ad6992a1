"""A fake engine exchange, and workers' exchanges around it on a memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from connector.layout.tensors import PROTOCOL_VERSION
from connector.messages import EngineCall, EngineNotification
from services.worker.engines.port import Identity
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from shared.bus.port import Bus
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvExchangeState, KvGrant, KvGroup, KvGroupKind, KvHandshake, LeaseKv
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import SystemClock
from tests.support.fleet_builders import FINGERPRINT, record
from tests.support.kv_messages import one_group
from tests.support.memory_bus import MemoryBus, MemoryHub

WAIT_S_MAX = 30.0
HASH = bytes(range(32))


def handshake(worker_id: str = "w1", epoch: int = 1, **more) -> KvHandshake:
    fields = {"fingerprint": FINGERPRINT.key(), "clock_s": 0.0, "version": PROTOCOL_VERSION, "blocks": 100}
    groups = [KvGroup(kind=KvGroupKind.FULL, block_size=32)]
    fields |= {"hash_block_size": 32, "alignment": 32, "groups": groups, "ranks": [], **more}
    return KvHandshake(worker_id=WorkerId(worker_id), epoch=Epoch(epoch), **fields)


def lease(holder: str = "h1", reader: str = "r1", ask_id: str = "a1", epoch: int = 1, **more) -> LeaseKv:
    fields = {"hashes": HASH, "hold_s": 5.0, **more}
    return LeaseKv(worker_id=WorkerId(holder), epoch=Epoch(epoch), reader_id=WorkerId(reader), ask_id=ask_id, **fields)


def grant(ask: LeaseKv, **more) -> KvGrant:
    fields = {"lease_id": "l1", "groups": one_group([1]), "last_hash": HASH, "until_s": 99.0, **more}
    fields = {"reader_id": ask.reader_id, "worker_id": ask.worker_id, "epoch": ask.epoch, **fields}
    return KvGrant(ask_id=ask.ask_id, **fields)


class FakeExchange:
    """Remembers every call. ``answer`` makes the notifications that a call is answered with."""

    def __init__(self, worker_id: str, epoch: int = 1, *, nixl_package: str = "") -> None:
        self.nixl_package = nixl_package
        self.handshake = handshake(worker_id, epoch)
        self.calls: list[EngineCall] = []
        self.answer: Callable[[EngineCall], EngineNotification] = lambda _call: EngineNotification()
        self.called = asyncio.Event()
        self.may_run = asyncio.Event()
        self.may_run.set()
        self._listeners: list[Callable[[EngineNotification], None]] = []

    async def call(self, call: EngineCall) -> EngineNotification:
        self.calls.append(call)
        self.called.set()
        await self.may_run.wait()
        notifications = self.answer(call)
        return msgspec.structs.replace(notifications, handshake=self.handshake) if call.describe else notifications

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        self._listeners.append(listener)

    def tell(self, **notifications) -> None:
        """The engine says something by itself."""
        for listener in self._listeners:
            listener(EngineNotification(**notifications))

    def every(self, field: str) -> list:
        """All that was ever told to the engine in that field."""
        return [item for call in self.calls for item in getattr(call, field)]

    async def told(self, field: str, count: int = 1) -> list:
        """Until that much was told in that field."""
        async with asyncio.timeout(WAIT_S_MAX):
            while len(found := self.every(field)) < count:
                self.called.clear()
                await self.called.wait()
        return found


class OneWorker:
    """A worker's exchange on a hub, or on a bus of its own."""

    def __init__(self, where: MemoryHub | Bus, worker_id: str, epoch: int = 1, *, nixl_package: str = "") -> None:
        self.worker_id = WorkerId(worker_id)
        self.epoch = Epoch(epoch)
        self.bus = MemoryBus(where) if isinstance(where, MemoryHub) else where
        self.engine = FakeExchange(worker_id, epoch, nixl_package=nixl_package)
        identity = Identity(self.worker_id, self.epoch)
        self.exchange = WorkerExchange(self.bus, SystemClock(), identity, self.engine, FINGERPRINT)

    async def say(self, phase: WorkerPhase = WorkerPhase.READY) -> None:
        worker_records = await self.bus.key_value_store(WORKER_RECORDS)
        await worker_records.put(record(self.worker_id, phase, self.epoch))

    async def leave(self) -> None:
        worker_records = await self.bus.key_value_store(WORKER_RECORDS)
        await worker_records.delete(self.worker_id)


@asynccontextmanager
async def exchanging(worker: OneWorker) -> AsyncIterator[OneWorker]:
    """A worker whose exchange is open and works."""
    await worker.exchange.open()
    following = asyncio.create_task(worker.exchange.follow())
    await worker.say()
    try:
        yield worker
    finally:
        following.cancel()
        await asyncio.wait([following])
        await worker.bus.close()


def exchange_state(**numbers) -> KvExchangeState:
    return KvExchangeState(**numbers)
