"""Orders about LoRA adapters: passed to the workers, logged, and carried out again on workers that start later."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from services.orchestrator.orders import TRIES_MAX, NoReply, OrderRefused, WorkerOrders
from shared.bus.port import Bus, BusError, Envelope, KeyValueStore, Subscription
from shared.contracts.channels import ADAPTER_ORDERED, CHANGE_ADAPTER, DESCRIBE_ADAPTERS, ORDER_ADAPTER, WANTED_ADAPTERS
from shared.contracts.fleet_orders import (
    NAME_CHARS_MAX,
    ORDER_WORKERS_MAX,
    PATH_CHARS_MAX,
    AdapterAction,
    AdapterChanged,
    AdapterOrdered,
    Adapters,
    AskAdapters,
    ChangeAdapter,
    OrderAdapter,
    WantedAdapter,
)
from shared.contracts.ids import Epoch, WorkerId, is_subject_token
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from shared.runtime.clock import Clock

# Which workers an order concerns, and which workers still lack an adapter that is wanted.

BY_CHARS_MAX = 128
KEY_CHARS = 32


def checked(order: OrderAdapter) -> OrderAdapter:
    """The order, if it may be stored and passed on. Raises OrderRefused."""
    if not order.name or len(order.name) > NAME_CHARS_MAX or not order.name.isprintable():
        raise OrderRefused(f"an adapter's name has 1 to {NAME_CHARS_MAX} characters")
    if order.action is AdapterAction.LOAD and not order.path:
        raise OrderRefused("a path is needed: a folder, relative to the workers' WORKER_LORA_DIR")
    if len(order.path) > PATH_CHARS_MAX or not order.path.isprintable():
        raise OrderRefused(f"a path has at most {PATH_CHARS_MAX} printable characters")
    if len(order.workers) > ORDER_WORKERS_MAX or not all(map(is_subject_token, order.workers)):
        raise OrderRefused(f"workers are given by id, at most {ORDER_WORKERS_MAX}")
    by = "".join(one for one in order.by if one.isprintable())[:BY_CHARS_MAX]
    return msgspec.structs.replace(order, by=by, workers=sorted(set(order.workers)))


def model_of(order: OrderAdapter, fleet: Iterable[FleetWorker]) -> str:
    """The model that the order means. Raises OrderRefused."""
    ready = [each for each in fleet if _computes(each)]
    if order.model:
        for each in ready:
            if order.model in each.record.models:
                return each.record.model
        raise OrderRefused(f"no worker of {order.model} is ready")
    named = [each for each in ready if not order.workers or each.record.worker_id in order.workers]
    models = sorted({each.record.model for each in named})
    if not models:
        raise OrderRefused("none of these workers is ready" if order.workers else "no worker is ready")
    if len(models) > 1:
        raise OrderRefused(f"there are several models ({', '.join(models)}): name the one that it adapts")
    return models[0]


def targets(order: OrderAdapter, model: str, fleet: Iterable[FleetWorker]) -> list[WorkerId]:
    """The ready workers that the order concerns. Raises OrderRefused if a worker that it names is not one of them."""
    ready = [each.record for each in fleet if _computes(each) and each.record.model == model]
    if unknown := sorted(set(order.workers) - {record.worker_id for record in ready}):
        raise OrderRefused(f"{', '.join(unknown)}: no such worker of {model} is ready")
    if order.workers:
        return list(order.workers)
    if order.action is AdapterAction.LOAD:
        return sorted(record.worker_id for record in ready)
    return sorted(record.worker_id for record in ready if any(one.name == order.name for one in record.adapters))


def after_load(order: OrderAdapter, model: str, before: WantedAdapter | None, at_ms: int) -> WantedAdapter:
    """What is wanted after this order. Of workers that it names, with those of earlier orders."""
    workers = order.workers
    if workers and before is not None and before.path == order.path:
        workers = sorted({*workers, *before.workers}) if before.workers else []
    return WantedAdapter(
        key=wanted_key(model, order.name),
        name=order.name,
        model=model,
        path=order.path,
        workers=workers,
        by=order.by,
        at_ms=at_ms,
    )


def after_unload(order: OrderAdapter, before: WantedAdapter | None) -> WantedAdapter | None:
    """What is wanted after this order; None: nothing. Raises OrderRefused."""
    if before is None or not order.workers:
        return None
    if not before.workers:
        raise OrderRefused(
            f"{order.name} is wanted on all workers of {before.model}: unload it from all, and load it on those that "
            "are to keep it"
        )
    left = sorted(set(before.workers) - set(order.workers))
    return msgspec.structs.replace(before, workers=left) if left else None


def lacking(wanted: Iterable[WantedAdapter], fleet: Sequence[FleetWorker]) -> list[tuple[WorkerId, WantedAdapter]]:
    """Ready workers without an adapter that is wanted there: they have started since the order."""
    return [
        (each.record.worker_id, one)
        for one in wanted
        for each in fleet
        if _computes(each)
        and each.record.model == one.model
        and (not one.workers or each.record.worker_id in one.workers)
        and all(adapter.name != one.name for adapter in each.record.adapters)
    ]


def wanted_key(model: str, name: str) -> str:
    """One subject token for each adapter of each model."""
    return hashlib.sha256(f"{model}\0{name}".encode()).hexdigest()[:KEY_CHARS]


def _computes(worker: FleetWorker) -> bool:
    return worker.phase is WorkerPhase.READY and worker.record.role is not Role.STORE and bool(worker.record.models)


CHANGE_S_MAX = 120.0
"""For a worker to copy, check and load an adapter."""
AT_ONCE_MAX = 16
"""Workers that change at the same time: they may read from one file server."""
LOG_MAX = 200
"""Orders that are kept to be shown; the process's log has all."""
SETTLE_MS = 5000
"""After an order, until workers that do not have the adapter get it again: records arrive a little later."""

log = logging.getLogger(__name__)

Try = tuple[WorkerId, Epoch, str, int]
"""Worker, its epoch, the wanted adapter's key, and when it was ordered."""


class AdapterOrders(WorkerOrders):
    """Orders about adapters, and the adapters that each model's workers shall have."""

    about = "adapters"

    def __init__(
        self, bus: Bus, clock: Clock, fleet: Callable[[], list[FleetWorker]], *, leading: Callable[[], bool]
    ) -> None:
        super().__init__(bus, clock, fleet, leading=leading)
        self._wanted: dict[str, WantedAdapter] = {}
        self._log: deque[AdapterOrdered] = deque(maxlen=LOG_MAX)
        self._tries: Counter[Try] = Counter()
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)

    async def _begin(self) -> list[Subscription]:
        stored = await (await self._store()).all()
        self._wanted = {one.key: one.value for one in stored if one.value is not None}
        return [
            await self._bus.answer(ORDER_ADAPTER, self._ordered),
            await self._bus.answer(DESCRIBE_ADAPTERS, self._describe),
        ]

    async def _store(self) -> KeyValueStore[WantedAdapter]:
        return await self._bus.key_value_store(WANTED_ADAPTERS)

    async def _describe(self, _ask: AskAdapters, _envelope: Envelope) -> Adapters:
        return Adapters(wanted=list(self._wanted.values()), orders=list(self._log))

    async def _ordered(self, order: OrderAdapter, _envelope: Envelope) -> AdapterOrdered:
        at_ms = self._clock.wall_ms()
        async with self._changing:
            try:
                order = checked(order)
                result = await self._carry_out(order, at_ms)
            except OrderRefused as refused:
                result = AdapterOrdered(order=order, at_ms=at_ms, refusal=str(refused))
            except BusError as error:
                why = f"NATS did not store the order: {error or type(error).__name__}"
                result = AdapterOrdered(order=order, at_ms=at_ms, refusal=why)
        await self._note(result)
        return result

    async def _carry_out(self, order: OrderAdapter, at_ms: int) -> AdapterOrdered:
        fleet, store = self._fleet(), await self._store()
        model = model_of(order, fleet)
        key, workers = wanted_key(model, order.name), targets(order, model, fleet)
        before = self._wanted.get(key)
        if order.action is AdapterAction.UNLOAD:
            after = after_unload(order, before)
            if not workers and before is None:
                raise OrderRefused(f"no worker of {model} has loaded {order.name}")
            await self._keep(store, key, after)
            return AdapterOrdered(order=order, at_ms=at_ms, changes=await self._change(order, workers))
        changes = await self._change(order, workers)
        if any(not change.failure for change in changes):
            await self._keep(store, key, after_load(order, model, before, at_ms))
        return AdapterOrdered(order=order, at_ms=at_ms, changes=changes)

    async def _keep(self, store: KeyValueStore[WantedAdapter], key: str, wanted: WantedAdapter | None) -> None:
        if wanted is not None:
            await store.put(wanted)
            self._wanted[key] = wanted
        elif self._wanted.pop(key, None) is not None:
            await store.delete(key)

    async def _change(self, order: OrderAdapter, workers: list[WorkerId]) -> list[AdapterChanged]:
        async with asyncio.TaskGroup() as changing:
            tasks = [
                changing.create_task(self._ask(order, worker_id), name=f"adapter {worker_id}") for worker_id in workers
            ]
        return [task.result() for task in tasks]

    async def _ask(self, order: OrderAdapter, worker_id: WorkerId) -> AdapterChanged:
        change = ChangeAdapter(worker_id=worker_id, action=order.action, name=order.name, path=order.path)
        async with self._slots:
            asked = self._bus.ask(CHANGE_ADAPTER, change, timeout_s=CHANGE_S_MAX)
            try:
                return await self._reply(asked, worker_id)
            except NoReply as why:
                return AdapterChanged(worker_id=worker_id, epoch=Epoch(0), failure=str(why))

    async def _repeat(self) -> None:
        """Workers that have started since an order, or failed it, get it again."""
        fleet = self._fleet()
        epochs = {each.record.worker_id: each.record.epoch for each in fleet}
        self._tries = Counter({one: count for one, count in self._tries.items() if epochs.get(one[0]) == one[1]})
        for worker_id, wanted in lacking(list(self._wanted.values()), fleet):
            tried: Try = (worker_id, epochs[worker_id], wanted.key, wanted.at_ms)
            if self._tries[tried] >= TRIES_MAX or self._clock.wall_ms() - wanted.at_ms < SETTLE_MS:
                continue
            self._tries[tried] += 1
            order = OrderAdapter(
                action=AdapterAction.LOAD,
                name=wanted.name,
                path=wanted.path,
                model=wanted.model,
                workers=[worker_id],
                by=wanted.by,
            )
            async with self._changing:
                changes = await self._change(order, [worker_id])
            at_ms = self._clock.wall_ms()
            await self._note(AdapterOrdered(order=order, at_ms=at_ms, changes=changes, automatic=True))

    async def _note(self, done: AdapterOrdered) -> None:
        """The audit: this process's log has every order; operators are informed."""
        order, again = done.order, ", again" if done.automatic else ""
        result = done.refusal or ", ".join(_as_text(change) for change in done.changes) or "no worker had it"
        what = (order.action.value, order.name, order.path)
        log.info("adapter order by %r%s: %s %r from %r: %s", order.by, again, *what, result)
        self._log.appendleft(done)
        try:
            await self._bus.publish(ADAPTER_ORDERED, done)
        except BusError as error:
            log.warning("the order's result was not published: %s", error or type(error).__name__)


def _as_text(change: AdapterChanged) -> str:
    return f"{change.worker_id}: {change.failure or change.digest[:12] or 'done'}"
