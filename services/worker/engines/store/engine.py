"""The store: replaces the engine in a worker that computes nothing and keeps copies of KV blocks.

``start_store`` waits for its partner, the first worker of the store's model, allocates memory, opens the files and
returns the running store, which keeps blocks of the partner's fingerprint only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, EngineNotification
from services.worker.engines.backends import check_backend
from services.worker.engines.port import (
    AsgiMessage,
    Engine,
    EngineDead,
    EngineExchange,
    EngineFacts,
    EngineLoad,
    EngineRefused,
    EngineTokens,
    Identity,
    KvEventFeed,
    Scope,
    StartEngine,
    TokenizerFiles,
)
from services.worker.engines.simulated.kv_exchange import nixl_package_of
from services.worker.engines.store.files import StoreFiles
from services.worker.engines.store.kv_exchange import StoreExchange
from services.worker.engines.store.memory import FileJobs, HostMemory, MoverOf, Storage, mover_of, transfer_of
from services.worker.engines.store.port import MakeMemory, StoreMemory
from services.worker.engines.store.records import BlockShape, blocks_in_object, shape_of
from services.worker.engines.store.slots import FileTier, ObjectTier
from services.worker.engines.store.tiers import Tiers
from services.worker.settings import Settings
from shared.bus.port import Bus, BusError
from shared.contracts.channels import KV_HANDSHAKE, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvEvent
from shared.contracts.kv_exchange import AskKvHandshake
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord
from shared.runtime.settings import CommonSettings

log = logging.getLogger("baton.worker")

PARTNER_POLL_S = 1.0
"""Interval at which the registry is read."""
HANDSHAKE_S_MAX = 2.0
ORPHAN_CHECK_S = 10.0
ORPHAN_S = 60.0
"""A store ends when all workers of its model have had other fingerprints for this long. Workers may be restarting."""
KNOWN = frozenset({WorkerPhase.PROBING, WorkerPhase.READY, WorkerPhase.DRAINING})
"""Phases in which a worker's record contains its fingerprint."""
CONNECTOR = "baton"
"""Prefix of the names of connectors that address KV by content."""


@dataclass(frozen=True, slots=True)
class Partner:
    """A worker whose blocks have the store's shape."""

    record: WorkerRecord
    shape: BlockShape


async def find_partner(bus: Bus, me: WorkerId, model: str) -> Partner:
    """Wait for a worker of that model that sends its handshake; of several, the one that started first."""
    while True:
        for record in fitting(await records(bus), model):
            ask = AskKvHandshake(worker_id=record.worker_id, reader_id=me)
            try:
                handshake = await bus.ask(KV_HANDSHAKE, ask, timeout_s=HANDSHAKE_S_MAX)
                if handshake.fingerprint == record.fingerprint.base_key():
                    return Partner(record, shape_of(handshake))
            except (BusError, ValueError) as error:
                log.info("%s sent no usable handshake: %s", record.worker_id, error)
        await asyncio.sleep(PARTNER_POLL_S)


async def records(bus: Bus) -> list[WorkerRecord]:
    """Records of all workers; empty while the registry cannot be read."""
    try:
        registry = await bus.key_value_store(WORKER_RECORDS)
        return [entry.value for entry in await registry.all() if entry.value is not None]
    except BusError as error:
        log.info("the registry cannot be read yet: %s", error)
        return []


def fitting(known: Sequence[WorkerRecord], model: str) -> list[WorkerRecord]:
    """Workers of that model whose KV can be copied, ordered by start."""
    names = {model, PurePath(model).name}
    fits = [
        record
        for record in known
        if record.role is not Role.STORE
        and record.phase in KNOWN
        and record.fingerprint.connector.startswith(CONNECTOR)
        and names & {*record.models, record.fingerprint.model}
    ]
    return sorted(fits, key=lambda record: (record.epoch, record.worker_id))


async def wait_until_orphaned(bus: Bus, fingerprint: str, model: str) -> str:
    """Return a reason to end once all workers of this model have had other fingerprints for ``ORPHAN_S``.

    A store keeps blocks of one fingerprint, and adopts the workers' new one when it is restarted.
    """
    others_since: float | None = None
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(ORPHAN_CHECK_S)
        known = {record.fingerprint.key() for record in fitting(await records(bus), model)}
        if not known or fingerprint in known:
            others_since = None
            continue
        others_since = loop.time() if others_since is None else others_since
        if loop.time() - others_since >= ORPHAN_S:
            return "all workers of the model have another fingerprint; the store must restart to adopt it"


LEASE_SHARE_MAX = 0.8
"""Share of the memory that leases may pin; the rest is for blocks that are loaded or copied."""
JOB_BYTES = 8 << 20
"""Bytes that one job copies between memory and files. A newly requested block waits for one such job at most."""
SAVE_S_MAX = 4.0
"""Time limit, when the store closes, for saving blocks that are not saved yet."""
BLOCKS_MIN = 16
"""Blocks that must fit into a store's memory."""
NO_LEGS = b'{"error":{"message":"a store serves no requests","type":"invalid_request_error","code":503}}'


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What a store is made of."""

    partner: Partner
    model: str
    identity: Identity
    memory_bytes: int
    files_bytes: int
    folder: Path
    lease_s_max: float = 30.0
    nixl_package: str = ""
    """See ``EngineExchange``."""
    objects_url: str = ""
    objects_bytes: int = 0


class StoreEngine(Engine, EngineExchange):
    """Its own KV exchange; computes nothing. Construct it on a running event loop."""

    def __init__(
        self,
        options: StoreOptions,
        shape: BlockShape,
        storage: Storage,
        make_mover: MoverOf,
        objects: Storage | None = None,
    ) -> None:
        blocks = storage.memory.blocks
        self.app, self.exchange, self.nixl_package = no_app, self, options.nixl_package
        self.facts = facts_of(options, blocks, storage.as_text())
        tiers = Tiers(
            storage.memory,
            FileTier(storage.files.slots if storage.files else 0),
            max(1, JOB_BYTES // shape.block_bytes),
            shape.plan,
            ObjectTier(objects.files.slots, blocks_in_object(shape.block_bytes)) if objects and objects.files else None,
            time.monotonic,
        )
        storages = [storage, *([objects] if objects else [])]
        for below, kept in zip(tiers.below, storages, strict=True):
            if kept.files is not None:
                below.slots.restore(kept.files.restored)
        holding = HolderSettings(
            worker_id=options.identity.worker_id,
            epoch=options.identity.epoch,
            lease_s_max=options.lease_s_max,
            lease_share_max=LEASE_SHARE_MAX,
        )
        self._shape = shape
        self._core = StoreExchange(holding, tiers, time.monotonic)
        self._mover, handshake = make_mover(options.identity, shape, storage.memory.address, blocks, self._wake_loop)
        self._core.describe(handshake)
        self._listeners: list[Callable[[EngineNotification], None]] = []
        self._load_listeners: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._jobs = [
            FileJobs(self._core, kept, number, wake=self._wake.set, fail=self._die)
            for number, kept in enumerate(storages)
        ]
        self._loop = asyncio.get_running_loop()
        self._died: asyncio.Future[str] = self._loop.create_future()
        self._feed = KvEventFeed(self._died, tiers.whole_as_events)
        self._tasks = [self._loop.create_task(self._run(), name="store")]
        self._tasks[0].add_done_callback(self._ended)

    async def call(self, call: EngineCall) -> EngineNotification:
        """Returns immediate results; later ones arrive as notifications. Raises EngineDead."""
        if self._died.done():
            raise EngineDead(self._died.result())
        notifications = self._core.call(call)
        self._wake.set()
        return notifications

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        self._listeners.append(listener)

    def load(self) -> EngineLoad:
        """``kv_tokens_used`` counts the tokens in the blocks of memory that hold named content."""
        state = self._core.state(self._shape.block_bytes, self._jobs[0].disk_free_bytes())
        return EngineLoad(kv_tokens_used=state.host_blocks * self._shape.block_tokens, store=state)

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        self._load_listeners.append(listener)

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """All changes of both tiers since the start. Raises EngineDead."""
        return self._feed.batches()

    def tokenizer_files(self) -> TokenizerFiles:
        """Raises ValueError. No router requests a tokenizer from a store."""
        raise ValueError("a store has no tokenizer")

    async def tokens(self, path: str, body: bytes) -> EngineTokens:  # noqa: ARG002  # the port's
        """Refuses. No router sends a body to a store."""
        return EngineTokens(refusal="a store has no tokenizer")

    async def dead(self) -> str:
        return await asyncio.shield(self._died)

    async def close(self, deadline_s: float) -> None:
        """Stop, and save the blocks that are not saved yet as far as the deadline allows."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=deadline_s)
        try:
            async with asyncio.timeout(min(deadline_s, SAVE_S_MAX)):
                await asyncio.gather(*(jobs.finish() for jobs in self._jobs))
        except TimeoutError:
            log.info("some blocks were not saved")
        await asyncio.to_thread(self._mover.close)
        for jobs in reversed(self._jobs):
            await jobs.close()  # Last, because the first owns the memory.

    def end_after(self, waiting: Coroutine[Any, Any, str]) -> None:
        """End the store when ``waiting`` returns; its result is the reason."""

        async def watch() -> None:
            self._die(await waiting)

        self._tasks.append(self._loop.create_task(watch(), name="store-partner"))

    async def _run(self) -> None:
        core = self._core
        while True:
            self._wake.clear()
            core.poll()
            if orders := core.take_orders():
                self._mover.submit(orders)
            if results := self._mover.take_results():
                core.results(results)
                continue
            for jobs in self._jobs:
                jobs.begin()
            self._tell()
            await self._sleep(core.wakes_at())

    async def _sleep(self, until: float | None) -> None:
        seconds = None if until is None else max(0.0, until - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _wake_loop(self) -> None:
        """Called on the mover's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _tell(self) -> None:
        if (notifications := self._core.take_notifications()) is not None:
            for listener in self._listeners:
                listener(notifications)
        if events := self._core.tiers.take_events():
            self._feed.tell(events)
            for changed in self._load_listeners:
                changed()

    def _ended(self, running: asyncio.Task[None]) -> None:
        error = None if running.cancelled() else running.exception()
        if error is not None:
            log.error("the store failed", exc_info=error)
        self._die("the store was closed" if error is None else f"the store failed: {error!r}")

    def _die(self, why: str) -> None:
        if not self._died.done():
            self._died.set_result(why)


def facts_of(options: StoreOptions, blocks: int, note: str) -> EngineFacts:
    """The partner's facts, with ``legs_max`` 0 because a store serves no legs."""
    record = options.partner.record
    return EngineFacts(
        engine="store",
        models=[options.model],
        max_model_len=record.max_model_len,
        fingerprint=record.fingerprint,
        hashing=record.hashing,
        kv_tokens=blocks * options.partner.shape.block_tokens,
        legs_max=0,
        step_tokens_max=record.step_tokens_max,
        note=note,
        kv_token_bytes=record.kv_token_bytes,
        kv_boundary_bytes=record.kv_boundary_bytes,
    )


async def no_app(_scope: Scope, _receive: object, send: Callable[[AsgiMessage], Awaitable[None]]) -> None:
    """Responds 503. The router sends no leg to a store."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": NO_LEGS})


async def start_store(
    settings: Settings,
    common: CommonSettings,
    report: Callable[[str], None],
    *,
    identity: Identity,
    bus: Bus,
    make_memory: MakeMemory = HostMemory,
) -> Engine:
    """Wait for a worker of the model and start a store for it. Raises ValueError for settings that cannot work."""
    model = settings.served_model_name or settings.model
    report(f"waiting for a worker of {model}")
    partner = await find_partner(bus, identity.worker_id, model)
    folder = folder_of(common, identity)
    transfer = transfer_of(settings, partner.record.engine)
    if transfer == "nixl":
        check_same_backend(settings.kv_backend, partner.record)
        await check_backend(nixl_package_of(transfer), settings.kv_backend)
    options = StoreOptions(
        partner=partner,
        model=partner.record.models[0] if partner.record.models else model,
        identity=identity,
        memory_bytes=settings.store_memory_bytes,
        files_bytes=settings.store_files_bytes,
        folder=folder,
        lease_s_max=settings.kv_lease_s,
        objects_url=settings.store_objects_url,
        objects_bytes=settings.store_objects_bytes,
        nixl_package=nixl_package_of(transfer),
    )
    report(f"opening {folder}" if options.files_bytes else "allocating memory")
    store = await open_store(options, mover_of(transfer, settings.kv_address, settings.kv_backend), make_memory)
    store.end_after(wait_until_orphaned(bus, partner.record.fingerprint.key(), model))
    return store


def check_same_backend(backend: str, partner: WorkerRecord) -> None:
    """Raises EngineRefused."""
    if (theirs := partner.fingerprint.kv_backend) != backend:
        raise EngineRefused(
            f"WORKER_KV_BACKEND={backend}: the worker {partner.worker_id}, whose KV this store is for, has {theirs}. "
            "NIXL moves KV by one plug-in at both ends: give both the same one"
        )


def store_with(make_memory: MakeMemory) -> StartEngine:
    """What an entry point of the group ``baton.engines`` names, to start a store with another memory."""
    return partial(start_store, make_memory=make_memory)


async def open_store(options: StoreOptions, make_mover: MoverOf, make_memory: MakeMemory) -> StoreEngine:
    """A running store; ``close`` ends it. Raises ValueError, FolderTaken, OSError."""
    shape = options.partner.shape
    blocks = shape.blocks_in(options.memory_bytes)
    if blocks < BLOCKS_MIN:
        raise ValueError(
            f"WORKER_STORE_MEMORY_BYTES={options.memory_bytes}: a block of {options.model} takes {shape.block_bytes} "
            f"bytes, and a store needs {BLOCKS_MIN} blocks; set it to {BLOCKS_MIN * shape.block_bytes} or more"
        )
    memory = make_memory(blocks, shape.block_bytes)
    thread = ThreadPoolExecutor(1, thread_name_prefix="store-files")
    slots, files = shape.blocks_in(options.files_bytes), None
    if slots:
        files = await asyncio.get_running_loop().run_in_executor(
            thread,
            lambda: StoreFiles(
                options.folder,
                identity=shape.identity(),
                block_bytes=shape.block_bytes,
                slots=slots,
                memory=(memory.address, blocks * shape.block_bytes),
            ),
        )
    storage = Storage(memory, files, thread)
    return StoreEngine(options, shape, storage, make_mover, await open_objects(options, shape, memory))


async def open_objects(options: StoreOptions, shape: BlockShape, memory: StoreMemory) -> Storage | None:
    """The tier below files, if there is one. Raises ValueError, FolderTaken, OSError."""
    together = blocks_in_object(shape.block_bytes)
    slots = shape.blocks_in(options.objects_bytes) // together * together
    if not options.objects_url or not slots:
        return None
    if not find_spec("obstore"):
        raise ValueError("WORKER_STORE_OBJECTS_URL: this needs the package obstore: pip install 'baton-serve[objects]'")
    from services.worker.engines.store.objects import ObjectFile  # most stores have no obstore

    try:
        objects = ObjectFile(options.objects_url, options.identity.worker_id, shape.block_bytes)
    except ValueError as error:
        raise ValueError(f"WORKER_STORE_OBJECTS_URL: {error}") from None
    thread = ThreadPoolExecutor(1, thread_name_prefix="store-objects")
    files = await asyncio.get_running_loop().run_in_executor(
        thread,
        lambda: StoreFiles(
            options.folder / "objects",
            identity=shape.identity(),
            block_bytes=shape.block_bytes,
            slots=slots,
            memory=(memory.address, memory.blocks * shape.block_bytes),
            elsewhere=objects,
        ),
    )
    thread.submit(objects.keep_only, {record.slot // together for record in files.restored})
    return Storage(memory, files, thread)


def folder_of(common: CommonSettings, identity: Identity) -> Path:
    """The folder of the store's files. It depends on the worker id only, so that a restarted store finds its blocks."""
    return (Path(common.state_dir) / "kv-store").expanduser() / identity.worker_id
