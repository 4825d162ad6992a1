"""A worker from its first breath to its last: register, start the engine, serve legs, drain, leave."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import msgspec

from services.worker.core.capacity import Capacity
from services.worker.core.draining import Draining
from services.worker.core.leg_order import KvPolicy
from services.worker.engines.port import Engine, EngineDead, Identity, StartEngine
from services.worker.exchange.unread import Unread
from services.worker.exchange.worker_exchange import WorkerExchange
from services.worker.publish import CachePublisher, LoadPublisher
from services.worker.registry import Registration
from services.worker.serve import LegServer
from services.worker.settings import Settings
from services.worker.tokenizer import TokenizerDesk
from shared.bus.port import BusDown
from shared.bus.streams import FrameSender
from shared.contracts.channels import CANCEL_LEG, KV_SNAPSHOT, START_LEG
from shared.contracts.control import ServicePhase
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.version import WIRE_VERSION
from shared.contracts.workers import Fingerprint, HashScheme, WorkerPhase, WorkerRecord
from shared.runtime.service import Service
from shared.runtime.settings import CommonSettings

log = logging.getLogger("baton.worker")

T = TypeVar("T")
ENGINES = {"vllm": "services.worker.engines.vllm_engine", "simulated": "services.worker.engines.simulated"}
"""Imported only when chosen: a machine for simulated workers has neither torch nor vLLM."""
SEEK_ROUTERS_S = 2.0
"""How long an engine works for a router that died."""
FAREWELL_S_MAX = 2.0
"""For the last frames to reach NATS."""
HANDOVER_S_MAX = 3.0
"""For decode engines to fetch the KV of prefill legs that have ended, before this engine goes."""
ENGINE_CLOSE_S_MAX = 5.0
LEAVING_S_MAX = FAREWELL_S_MAX + HANDOVER_S_MAX + ENGINE_CLOSE_S_MAX
"""What a worker needs after its last leg."""


def engine_starter(name: str) -> StartEngine:
    """``start_engine`` of the engine of that name."""
    return cast("StartEngine", importlib.import_module(ENGINES[name]).start_engine)


async def run_worker(service: Service, settings: Settings, common: CommonSettings, start_engine: StartEngine) -> None:
    """The whole life. Raises EngineDead when the engine dies, which ends the process."""
    epoch = Epoch(service.clock.wall_ms())
    registration = Registration(service.bus, first_record(settings, epoch))
    service.tasks.create_task(registration.follow(), name="renew-registration")

    def say(detail: str) -> None:
        service.set_phase(ServicePhase.STARTING, detail)

    try:
        starting = start_engine(settings, common, say, identity=Identity(registration.record.worker_id, epoch))
        engine = await _unless_stopped(starting, service.stopping)
        if engine is None:
            return
        try:
            await Worker(service, settings, engine, registration).live()
        finally:
            await engine.close(ENGINE_CLOSE_S_MAX)
    finally:
        await registration.remove()


class Worker:
    """One running engine on the bus."""

    def __init__(self, service: Service, settings: Settings, engine: Engine, registration: Registration) -> None:
        record = registration.record
        worker_id, epoch = record.worker_id, record.epoch
        self._service = service
        self._settings = settings
        self._engine = engine
        self._registration = registration
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cache = CachePublisher(service.bus, worker_id, epoch)
        self._load = LoadPublisher(service.bus, worker_id, epoch, record.role, held=self._cache.held, engine=engine)
        self._tokenizer = TokenizerDesk(engine, worker_id, epoch)
        self._sender = FrameSender(service.bus, worker_id, epoch)
        self._exchange = make_exchange(service, engine, Identity(worker_id, epoch))
        if self._exchange is not None:
            self._load.tell_of(self._exchange)
        self._server = LegServer(
            service,
            engine,
            self._sender,
            Capacity(epoch, engine.facts.legs_max),
            self._death,
            self._load.changed,
            KvPolicy(settings.cache_hit_threshold, settings.kv_fetch_min_tokens),
        )
        if self._exchange is not None:
            self._server.unread = Unread(self._exchange, Identity(worker_id, epoch))

    async def live(self) -> None:
        """Serve until the service is to stop, then drain. Raises EngineDead."""
        tasks = self._service.tasks
        background = [
            tasks.create_task(self._watch_engine(), name="watch-engine"),
            tasks.create_task(self._follow_cache(), name="follow-cache"),
            tasks.create_task(self._load.follow(lambda: (self._server.phase, self._server.legs)), name="report-load"),
            tasks.create_task(self._seek_routers(), name="seek-routers"),
        ]
        try:
            await self._until(self._open())
            if self._exchange is not None:
                background.append(tasks.create_task(self._exchange.follow(), name="follow-exchange"))
            await self._enter(WorkerPhase.READY, ServicePhase.READY)
            await self._until(self._service.stopping.wait())
            await self._drain()
        except EngineDead as dead:
            await self._die(str(dead))
            raise
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)

    async def _open(self) -> None:
        """Every subscription is live before the worker says that it is ready."""
        bus, worker_id = self._service.bus, self._registration.record.worker_id
        if self._exchange is not None:
            await self._exchange.open()
        await bus.answer(KV_SNAPSHOT, self._cache.answer, worker_id=worker_id)
        await self._tokenizer.open(bus)
        await bus.subscribe(CANCEL_LEG, self._server.cancel, worker_id=worker_id)
        await bus.subscribe(START_LEG, self._server.start, worker_id=worker_id)

    async def _enter(self, phase: WorkerPhase, service_phase: ServicePhase) -> None:
        self._server.phase = phase
        self._load.changed()
        await self._registration.say(ready_record(self._registration.record, self._engine, phase))
        self._service.set_phase(service_phase)

    async def _drain(self) -> None:
        draining = Draining(since=self._service.clock.now(), s_max=self._settings.drain_s_max)
        await self._enter(WorkerPhase.DRAINING, ServicePhase.DRAINING)
        if not await self._until(self._server.idle(draining.left_s(self._service.clock.now()))):
            self._server.fail_all(draining.verdict())
        await self._farewell()
        await self._until(self._hand_over())
        if self._exchange is not None:
            await self._until(self._exchange.release_all())

    async def _hand_over(self) -> None:
        """KV that decode engines are about to fetch is leased or, without an exchange, in use without a leg."""
        try:
            async with asyncio.timeout(HANDOVER_S_MAX):
                if self._exchange is not None:
                    await self._exchange.handed_over()
                else:
                    await self._blocks_free()
        except TimeoutError:
            log.info("some prefilled KV was not fetched; its decode engines will compute it themselves")

    async def _blocks_free(self) -> None:
        changed = asyncio.Event()
        self._engine.on_load_changed(changed.set)
        while self._engine.load().kv_blocks_used:
            changed.clear()
            await changed.wait()

    async def _die(self, why: str) -> None:
        log.error("the engine died: %s", why)
        self._server.phase = WorkerPhase.GONE
        self._server.fail_all(Failure(reason=Reason.ENGINE_DEAD, message=why))
        await self._farewell()

    async def _farewell(self) -> None:
        """The last frames leave before the process does."""
        try:
            async with asyncio.timeout(FAREWELL_S_MAX):
                await self._sender.close()
                await self._service.bus.flush(FAREWELL_S_MAX)
        except (TimeoutError, BusDown) as error:
            log.warning("the last frames may not have been sent: %s", error or "time is up")

    async def _until(self, done: Awaitable[T]) -> T:
        """Wait for ``done``. Raises EngineDead if that comes first."""
        task = asyncio.ensure_future(done)
        either: list[asyncio.Future[Any]] = [task, self._death]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            task.cancel()
            raise EngineDead(self._death.result())
        return task.result()

    async def _watch_engine(self) -> None:
        self._note_death(await self._engine.dead())

    async def _seek_routers(self) -> None:
        while True:
            await asyncio.sleep(SEEK_ROUTERS_S)
            await self._sender.seek_routers()

    async def _follow_cache(self) -> None:
        try:
            await self._cache.follow(self._engine)
        except* EngineDead as dead:
            self._note_death(str(dead.exceptions[0]))

    def _note_death(self, why: str) -> None:
        if not self._death.done():
            self._death.set_result(why)


def make_exchange(service: Service, engine: Engine, identity: Identity) -> WorkerExchange | None:
    """For an engine that has an end of it."""
    if engine.exchange is None:
        return None
    return WorkerExchange(service.bus, service.clock, identity, engine.exchange, engine.facts.fingerprint.key())


async def _unless_stopped(starting: Awaitable[Engine], stopping: asyncio.Event) -> Engine | None:
    """The engine, or None when the service was to stop first."""
    start, stop = asyncio.ensure_future(starting), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            return start.result()
        return None
    finally:
        stop.cancel()
        start.cancel()
        await asyncio.wait([start])


def first_record(settings: Settings, epoch: Epoch) -> WorkerRecord:
    """What is known before the engine has started."""
    model = settings.served_model_name or settings.model
    fingerprint = Fingerprint(
        model=model,
        revision=settings.revision,
        dtype="",
        block_size=settings.block_size,
        kv_layout="",
        connector="",
        engine_version="",
    )
    return WorkerRecord(
        worker_id=WorkerId(settings.worker_id),
        epoch=epoch,
        role=settings.role,
        phase=WorkerPhase.STARTING,
        engine=settings.engine,
        models=[model],
        max_model_len=settings.max_model_len,
        fingerprint=fingerprint,
        hashing=HashScheme(block_size=settings.block_size),
        kv_blocks=0,
        legs_max=settings.legs_max,
        host=socket.gethostname(),
        pid=os.getpid(),
        wire_version=WIRE_VERSION,
    )


def ready_record(record: WorkerRecord, engine: Engine, phase: WorkerPhase) -> WorkerRecord:
    """The same worker, with what its engine says of itself."""
    facts = engine.facts
    return msgspec.structs.replace(
        record,
        phase=phase,
        engine=facts.engine,
        models=facts.models,
        max_model_len=facts.max_model_len,
        fingerprint=facts.fingerprint,
        hashing=facts.hashing,
        kv_blocks=facts.kv_blocks,
        legs_max=facts.legs_max,
        step_tokens_max=facts.step_tokens_max,
        prefix_caching=facts.prefix_caching,
    )
