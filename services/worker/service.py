"""A worker's life: register, start the engine, test the KV exchange, serve legs, drain, end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from typing import Any, TypeVar, cast

import msgspec

from services.worker.engines.adapters import load_at_start
from services.worker.engines.plugged import load_plugged
from services.worker.engines.port import Engine, EngineDead, EngineRefused, Identity, StartEngine
from services.worker.kv_events import CachePublisher
from services.worker.kv_exchange.prefetch_orders import PrefetchHandler
from services.worker.kv_exchange.prefix_copy import StoreCopies
from services.worker.kv_exchange.suspects import Suspects
from services.worker.kv_exchange.worker_exchange import UnreadOffers, WorkerExchange
from services.worker.late_reports import LateReports
from services.worker.legs.body import KvPolicy
from services.worker.legs.guard import Capacity
from services.worker.legs.server import LegServer
from services.worker.lifecycle.drain import FLUSH_S_MAX, HANDOFF_S_MAX, Drain, DrainPlan
from services.worker.lifecycle.order_handler import AdapterHandler, OrderHandler
from services.worker.lifecycle.probing import Prober
from services.worker.lifecycle.profiling import ProfileHandler
from services.worker.lifecycle.rank_group import RankGroup, join, place_of
from services.worker.lifecycle.registration import Registration, SavedRole, WorkerStatus, follow_health, new_epoch
from services.worker.lifecycle.self_test import ReadSpeeds, SelfTestHandler
from services.worker.lifecycle.sleeping import Sleep
from services.worker.lifecycle.weights import WeightsHandler
from services.worker.load_reports import LoadPublisher
from services.worker.prompt_handlers import RenderHandler, TokenizerHandler
from services.worker.settings import Settings
from shared.bus.frame_sender import FrameSender
from shared.contracts.channels import CANCEL_LEG, KV_SNAPSHOT, START_LEG
from shared.contracts.control import ServicePhase
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import Fingerprint, HashScheme, Role, WorkerPhase, WorkerRecord
from shared.runtime.service import Service
from shared.runtime.settings import CommonSettings
from shared.runtime.state_folder import forget_refusal, save_refusal

log = logging.getLogger("baton.worker")

T = TypeVar("T")
ENGINES = {
    "vllm": "services.worker.engines.vllm.engine",
    "simulated": "services.worker.engines.simulated.engine",
    "attached": "services.worker.engines.attached.engine",
}
"""Modules by engine, imported only when chosen: a machine for simulated workers may have neither torch nor vLLM."""
IN_FLIGHT_LISTS_S = 2.0
"""Time that an engine may work for a router that has died."""
UNSEEN_TOKENS_S = 1.0
"""How often routers are told of streams whose tokens have nothing to show."""
ENGINE_CLOSE_S_MAX = 5.0
SHUTDOWN_S_MAX = 2 * FLUSH_S_MAX + HANDOFF_S_MAX + ENGINE_CLOSE_S_MAX
"""Time limit for what a worker does after its last leg."""


def engine_starter(name: str) -> StartEngine:
    """Raises WrongConfiguration."""
    start = importlib.import_module(ENGINES[name]).start_engine if name in ENGINES else load_plugged(name)
    return cast("StartEngine", start)


class Ending(Enum):
    """Why a worker left."""

    STOPPED = auto()
    """The process got SIGTERM."""
    DRAINED = auto()
    """The worker was ordered to drain."""
    ASLEEP = auto()
    """The process begins anew, without an engine."""


async def not_known() -> None:
    """For a worker in a process of others: its sockets cannot be told from theirs."""


async def run_worker(
    service: Service,
    settings: Settings,
    common: CommonSettings,
    start_engine: StartEngine,
    find_addresses: Callable[[], Awaitable[list[str] | None]] = not_known,
    late: LateReports | None = None,
) -> Ending:
    """From registration to removal. ``find_addresses``: where others reach the worker and its engine. ``late`` reports
    while the event loop is held. Raises EngineRefused when the engine cannot serve and EngineDead when it dies; both
    end the process.
    """
    saved_role = SavedRole(common.state_dir, settings.worker_id, settings.role)
    settings = msgspec.structs.replace(settings, role=saved_role.role)
    epoch = await new_epoch(service.bus, WorkerId(settings.worker_id), service.clock.wall_ms())
    registration = Registration(service.bus, first_record(settings, epoch))
    service.tasks.create_task(registration.follow(), name="renew-registration")

    def report(detail: str) -> None:
        service.set_phase(ServicePhase.STARTING, detail)

    group: RankGroup | None = None
    try:
        if settings.asleep and not await Sleep(service, registration).until_woken():
            saved_role.forget()
            return Ending.STOPPED if service.stopping.is_set() else Ending.DRAINED
        if settings.data_parallel_size > 1:
            joining = join(place_of(settings, common.state_dir), settings.data_parallel_port, report)
            group = await _unless_stopped(joining, service.stopping)
            if group is None:
                return Ending.STOPPED
            settings = msgspec.structs.replace(settings, data_parallel_port=group.port)
        starting = start_engine(settings, common, report, identity=Identity(registration.record.worker_id, epoch))
        engine = await _unless_stopped(starting, service.stopping, group)
        if engine is None:
            saved_role.forget()
            return Ending.STOPPED
        close_s_max = ENGINE_CLOSE_S_MAX
        try:
            await load_at_start(engine.adapters, settings.lora_adapters, settings.lora_dir)
            forget_refusal(common.state_dir, settings.worker_id)
            await registration.update(msgspec.structs.replace(registration.record, listens=await find_addresses()))
            suspects = Suspects(common.state_dir, settings.worker_id, service.clock)
            plan = await Worker(service, settings, engine, registration, saved_role, suspects, late, group=group).run()
        except EngineDead:
            close_s_max = 0.0  # What is left of it may wait for a rank that is gone, and would not end by itself.
            raise
        finally:
            if group is not None:
                group.close()
            await engine.close(close_s_max)
        if service.stopping.is_set() or not (plan.ordered or plan.sleeps):
            return Ending.STOPPED
        return Ending.ASLEEP if plan.sleeps else Ending.DRAINED
    except EngineRefused as refused:
        save_refusal(common.state_dir, settings.worker_id, str(refused))
        raise
    finally:
        if group is not None:
            group.close()
        await registration.remove()


class Worker:
    """One running engine on the bus."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        service: Service,
        settings: Settings,
        engine: Engine,
        registration: Registration,
        saved_role: SavedRole,
        suspects: Suspects,
        late: LateReports | None,
        *,
        group: RankGroup | None,
    ) -> None:
        record = registration.record
        worker_id, epoch = record.worker_id, record.epoch
        identity = Identity(worker_id, epoch)
        self._service = service
        self._engine = engine
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cache = CachePublisher(service.bus, worker_id, epoch)
        self._sender = FrameSender(service.bus, worker_id, epoch)
        self._exchange = exchange = make_exchange(service, engine, identity)
        self._suspects = suspects
        self._load = LoadPublisher(
            service.bus,
            worker_id,
            epoch,
            record.role,
            held=self._cache.held,
            engine=engine,
            exchange=exchange,
            late=late,
            speed_of=group.speed if group is not None else None,
        )
        self._server = LegServer(
            service,
            engine,
            self._sender,
            Capacity(epoch, engine.facts.legs_max),
            self._death,
            self._load.changed,
            KvPolicy(settings.cache_hit_threshold, settings.kv_fetch_min_tokens),
            None if exchange is None else UnreadOffers(exchange, identity),
        )
        self._prober = None
        renderer = RenderHandler(engine.renderer, worker_id, epoch, service.bus)
        self._opens = [TokenizerHandler(engine, worker_id, epoch, service.bus).open, renderer.open]
        self._follows: list[Callable[[], Coroutine[Any, Any, None]]] = []
        if exchange is not None:
            for suspect, seconds in suspects.refused_s().items():
                exchange.peers.refuse(suspect, seconds)
            self._opens.append(exchange.open)
            self._follows.append(exchange.follow)
        if exchange is not None and record.role is not Role.STORE:  # A store cannot generate, so it runs no self-test.
            speeds = ReadSpeeds(exchange.measure_read, registration, exchange.way_from)
            settled, measure, digest = exchange.peers.settled, speeds.measure, exchange.digest
            self_tests = SelfTestHandler(service.bus, service.clock, engine, identity, settled, measure, digest)
            self._prober = Prober(worker_id, exchange.peers, self_tests, lends=engine.facts.prefix_caching)
            prefetches = PrefetchHandler(service.bus, service.clock, identity, renderer, exchange)
            self._opens += [self_tests.open, prefetches.open]
            self._follows.append(prefetches.follow)
            copies = StoreCopies(service.bus, exchange, lambda: registration.record, settings)
            self._follows.append(copies.follow)
        self._status = WorkerStatus(
            service, registration, self._load, self._server, engine.facts, saved_role, engine.adapters
        )
        self._weights = WeightsHandler(
            service.bus,
            service.clock,
            self._status,
            engine.weights,
            settings.weights_dir,
            on_named=exchange.peers.set_weights if exchange is not None else lambda _weights: None,
        )
        self._keeps_weights = engine.facts.engine == "vllm"  # of the model that the worker names
        self._take_orders_about_the_engine(settings.lora_dir)
        self._group = group
        self._orders = OrderHandler(service, self._server, self._prober, self._status, settings.drain_s_max, group)
        self._drain = Drain(
            service, settings, engine, exchange, self._server, self._sender, lambda: registration.record
        )

    def _take_orders_about_the_engine(self, lora_dir: str) -> None:
        """Adapters, profiles and weights."""
        service, engine, status = self._service, self._engine, self._status
        adapters = AdapterHandler(service.bus, service.clock, status, engine.adapters, lora_dir)
        profiles = ProfileHandler(service, engine, self._server, status)
        self._opens += [adapters.open, profiles.open, self._weights.open]
        self._follows.append(profiles.follow)
        if self._keeps_weights:
            self._follows += [self._weights.follow, self._weights.end_when_ruined]

    async def run(self) -> DrainPlan:
        """Serve until an order or SIGTERM, then drain. Raises EngineDead."""
        tasks, group = self._service.tasks, self._group
        if group is not None:
            group.lost.add_done_callback(lambda lost: self._note_death(lost.result()))
        background: list[asyncio.Task[Any]] = [
            tasks.create_task(self._watch_engine(), name="watch-engine"),
            tasks.create_task(self._until_dead(self._cache.follow(self._engine)), name="follow-cache"),
            tasks.create_task(
                self._load.publish(lambda: (self._server.phase, self._server.sequences)), name="publish-load-reports"
            ),
            tasks.create_task(self._send_in_flight_lists(), name="send-in-flight-lists"),
            tasks.create_task(self._tell_of_tokens(), name="tell-of-tokens"),
        ]
        try:
            await self._until(self._open())
            background += [
                tasks.create_task(self._until_dead(follow()), name="follow-exchange") for follow in self._follows
            ]
            drain_wanted = tasks.create_task(self._orders.wait_for_drain(), name="await-orders")
            background.append(drain_wanted)
            await self._until(self._be_ready_unless(drain_wanted))
            plan = await self._until(drain_wanted)
            if group is not None:
                group.begin_drain(plan)
            await self._status.draining(sleeps=plan.sleeps)
            await self._until(self._drain.run(plan))
            if group is not None:
                await self._until(group.end_drain(plan))
            # It reports no load from here on: one that is still registered while its engine ends would look lost.
            await self._status.gone()
            return plan
        except EngineDead as dead:
            await self._die(str(dead))
            raise
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)

    async def _open(self) -> None:
        """Every subscription is live before the registry shows the worker."""
        bus, record = self._service.bus, self._status.record
        worker_id = record.worker_id
        for open_handler in self._opens:
            await open_handler()
        await bus.answer(KV_SNAPSHOT, self._cache.answer, worker_id=worker_id, epoch=str(record.epoch))
        await self._orders.open()
        await bus.subscribe(CANCEL_LEG, self._server.cancel, worker_id=worker_id)
        await bus.subscribe(START_LEG, self._server.start, worker_id=worker_id)

    async def _be_ready_unless(self, drain_wanted: asyncio.Task[DrainPlan]) -> None:
        """Take legs once the KV self-test has passed, unless the worker is to drain before that."""
        remark = await self._probe_until(drain_wanted, self._prober) if self._prober is not None else ""
        group = self._group.text if self._group is not None else ""
        note = "; ".join(filter(None, (group, self._engine.facts.note, remark, self._suspects.note)))
        if drain_wanted.done():
            return
        if self._keeps_weights:
            await self._weights.settle()
            await _unless_first(drain_wanted, follow_health(self._weights, self._status, note))
        elif self._engine.health is not None:
            await _unless_first(drain_wanted, follow_health(self._engine.health, self._status, note))
        else:
            await self._status.ready(note)

    async def _probe_until(self, drain_wanted: asyncio.Task[DrainPlan], prober: Prober) -> str:
        """Run the KV self-test until it has passed or the worker is to drain; returns what operators should know."""
        await self._status.probing()
        probing = asyncio.create_task(prober.until_passed(self._status.probing), name="probe")
        try:
            await asyncio.wait([probing, drain_wanted], return_when=asyncio.FIRST_COMPLETED)
            return probing.result() if probing.done() else ""
        finally:
            probing.cancel()

    async def _die(self, why: str) -> None:
        log.error("the engine died: %s", why)
        if self._exchange is not None:
            self._suspects.add(self._exchange.peers.connecting())
        self._server.phase = WorkerPhase.GONE
        self._server.fail_all(Failure(reason=Reason.ENGINE_DEAD, message=why))
        await self._drain.flush_frames()

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

    async def _send_in_flight_lists(self) -> None:
        while True:
            await asyncio.sleep(IN_FLIGHT_LISTS_S)
            await self._sender.send_in_flight_lists()

    async def _tell_of_tokens(self) -> None:
        while True:
            await asyncio.sleep(UNSEEN_TOKENS_S)
            self._server.tell_of_tokens()

    async def _until_dead(self, follow: Awaitable[None]) -> None:
        """Follow the engine until that is cancelled, or finds the engine dead."""
        try:
            await follow
        except* EngineDead as dead:
            first: BaseException = dead
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self._note_death(str(first))

    def _note_death(self, why: str) -> None:
        if not self._death.done():
            self._death.set_result(why)


async def _unless_first(wanted: asyncio.Task[DrainPlan], follow: Coroutine[Any, Any, None]) -> None:
    """Follow until the drain is wanted. Nothing that it does comes after that."""
    following = asyncio.create_task(follow, name="follow-health")
    try:
        await asyncio.wait([wanted, following], return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        following.cancel()
        await asyncio.wait([following])


def make_exchange(service: Service, engine: Engine, identity: Identity) -> WorkerExchange | None:
    """None for an engine without a KV exchange."""
    if engine.exchange is None:
        return None
    own = engine.facts.fingerprint
    exchange = WorkerExchange(service.bus, service.clock, identity, engine.exchange, own)
    exchange.peers.set_weights(own.weights)
    return exchange


async def _unless_stopped(starting: Awaitable[T], stopping: asyncio.Event, group: RankGroup | None = None) -> T | None:
    """What is started, or None when the service stops before that. Raises EngineDead when another worker of the group
    has ended before that.
    """
    start, stop = asyncio.ensure_future(starting), asyncio.ensure_future(stopping.wait())
    first: list[asyncio.Future[Any]] = [start, stop]
    if group is not None:
        first += [group.lost, group.drain_wanted]
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            return start.result()
        if group is not None and group.lost.done():
            raise EngineDead(group.lost.result())
        return None
    finally:
        stop.cancel()
        start.cancel()
        await asyncio.wait([start])


def first_record(settings: Settings, epoch: Epoch) -> WorkerRecord:
    """The record before the engine has started."""
    fingerprint = Fingerprint(
        model=settings.named_model,
        revision=settings.revision,
        dtype="",
        block_size=settings.block_tokens,
        kv_layout="",
        connector="",
        engine_version="",
    )
    return WorkerRecord(
        worker_id=WorkerId(settings.worker_id),
        epoch=epoch,
        role=settings.role,
        phase=WorkerPhase.ASLEEP if settings.asleep else WorkerPhase.STARTING,
        engine=settings.engine if settings.role is not Role.STORE else Role.STORE.value,
        models=settings.model_names,
        max_model_len=settings.max_model_len,
        fingerprint=fingerprint,
        hashing=HashScheme(block_size=settings.block_tokens),
        kv_tokens=0,
        legs_max=settings.legs_max,
        host=socket.gethostname(),
        pid=os.getpid(),
        wire_version=WIRE_VERSION,
        ranks=settings.ranks,
        cache_hit_threshold=settings.cache_hit_threshold,
    )
