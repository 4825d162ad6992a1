"""Orders about models' weights: all workers of a model move together.

The orchestrator keeps which weights a model has. A worker that has not got them does not serve, and says so in its
registry entry. One that starts later loads them, too, where they are in a folder.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from services.orchestrator.orders import ENDED, TRIES_MAX, NoReply, OrderRefused, WorkerOrders
from shared.bus.port import Bus, BusError, Envelope, KeyValueStore, Subscription
from shared.contracts.channels import CHANGE_WEIGHTS, DESCRIBE_WEIGHTS, ORDER_WEIGHTS, WANTED_WEIGHTS
from shared.contracts.fleet_orders import (
    NAME_CHARS_MAX,
    PATH_CHARS_MAX,
    WEIGHTS_BYTES_MAX,
    AskWeights,
    ChangeWeights,
    ModelWeights,
    OrderWeights,
    WantedWeights,
    Weights,
    WeightsAction,
    WeightsChanged,
    WeightsOrdered,
    weights_key,
)
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import FleetWorker, Role, WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

CHANGE_S_MAX = 3600.0
"""For a worker to load a checkpoint, or to drain before it pauses."""
NONCE_BYTES = 4
BY_CHARS_MAX = 128
REACHED = frozenset({WorkerPhase.READY, WorkerPhase.PROBING})
NAMES = frozenset({WeightsAction.LOAD, WeightsAction.FINISH})
"""Actions after which the model has other weights."""

log = logging.getLogger(__name__)
_object = msgspec.json.Decoder(dict[str, Any])

Try = tuple[WorkerId, Epoch, str]
"""Worker, its epoch, and the weights that it lacks."""


def checked(order: OrderWeights) -> OrderWeights:
    """The order, if it may be stored and passed on. Raises OrderRefused."""
    if len(order.version) > NAME_CHARS_MAX or not order.version.isprintable():
        raise OrderRefused(f"a version has at most {NAME_CHARS_MAX} printable characters")
    if order.action is WeightsAction.LOAD and not order.path:
        raise OrderRefused("a path is needed: a folder, relative to the workers' WORKER_WEIGHTS_DIR")
    if len(order.path) > PATH_CHARS_MAX or not order.path.isprintable():
        raise OrderRefused(f"a path has at most {PATH_CHARS_MAX} printable characters")
    if len(order.payload) > WEIGHTS_BYTES_MAX:
        raise OrderRefused(f"an order has at most {WEIGHTS_BYTES_MAX} bytes for the engines")
    by = "".join(one for one in order.by if one.isprintable())[:BY_CHARS_MAX]
    return msgspec.structs.replace(order, by=by)


def reached(fleet: Iterable[FleetWorker], model: str = "") -> list[WorkerRecord]:
    """Records of the workers, of this model or of any, that orders about weights are for; sorted by id."""
    records = [
        each.record
        for each in fleet
        if each.phase in REACHED and each.record.role is not Role.STORE and each.record.models
    ]
    found = [record for record in records if not model or model in record.models]
    return sorted(found, key=lambda record: record.worker_id)


def model_of(order: OrderWeights, fleet: Sequence[FleetWorker]) -> str:
    """The model that the order means. Raises OrderRefused."""
    models = sorted({record.model for record in reached(fleet, order.model)})
    if not models:
        raise OrderRefused(f"no worker of {order.model} is ready" if order.model else "no worker is ready")
    if len(models) > 1:
        raise OrderRefused(f"there are several models ({', '.join(models)}): name the one whose weights are meant")
    return models[0]


def payload_for(order: OrderWeights, ranks_before: int) -> bytes:
    """What the worker's engine gets. To connect to a trainer, each rank of all workers needs a number of its own:
    ``ranks_before`` are those of the workers before it. Raises OrderRefused.
    """
    if order.action is not WeightsAction.INIT:
        return order.payload
    try:
        told = _object.decode(order.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OrderRefused(f"`init_info` cannot be read: {error}") from None
    if type(told.get("rank_offset")) is int:
        told["rank_offset"] += ranks_before
    return msgspec.json.encode(told)


def after(order: OrderWeights, before: WantedWeights, weights: str, at_ms: int) -> WantedWeights:
    """What is wanted when a worker has carried out the order."""
    if order.action in NAMES:
        return msgspec.structs.replace(
            before, weights=weights, version=order.version, path=order.path, by=order.by, at_ms=at_ms
        )
    if order.action in (WeightsAction.PAUSE, WeightsAction.RESUME):
        return msgspec.structs.replace(before, paused=order.action is WeightsAction.PAUSE, by=order.by, at_ms=at_ms)
    return before


def lacking(wanted: Iterable[WantedWeights], fleet: Sequence[FleetWorker]) -> list[tuple[WorkerRecord, WantedWeights]]:
    """Workers without the weights of their model, which are in a folder."""
    return [
        (record, one)
        for one in wanted
        if one.path
        for record in reached(fleet, one.model)
        if record.model == one.model and record.fingerprint.weights != one.weights
    ]


class WeightOrders(WorkerOrders):
    """Orders about weights, and the weights that each model's workers shall have."""

    about = "weights"

    def __init__(
        self, bus: Bus, clock: Clock, fleet: Callable[[], list[FleetWorker]], *, leading: Callable[[], bool]
    ) -> None:
        super().__init__(bus, clock, fleet, leading=leading)
        self._wanted: dict[str, WantedWeights] = {}
        self._tries: Counter[Try] = Counter()

    async def _begin(self) -> list[Subscription]:
        stored = await (await self._store()).all()
        self._wanted = {one.key: one.value for one in stored if one.value is not None}
        return [
            await self._bus.answer(ORDER_WEIGHTS, self._ordered),
            await self._bus.answer(DESCRIBE_WEIGHTS, self._describe),
        ]

    async def _store(self) -> KeyValueStore[WantedWeights]:
        return await self._bus.key_value_store(WANTED_WEIGHTS)

    async def _describe(self, _ask: AskWeights, _envelope: Envelope) -> Weights:
        records = reached(self._fleet())
        models = sorted({record.model for record in records})
        return Weights(
            models=[
                ModelWeights(
                    wanted=self._of(model),
                    workers=[record.worker_id for record in records if record.model == model],
                    ranks=sum(record.ranks for record in records if record.model == model),
                )
                for model in models
            ]
        )

    def _of(self, model: str) -> WantedWeights:
        key = weights_key(model)
        return self._wanted.get(key) or WantedWeights(key=key, model=model)

    async def _ordered(self, order: OrderWeights, _envelope: Envelope) -> WeightsOrdered:
        model = order.model
        async with self._changing:
            try:
                order = checked(order)
                model = model_of(order, self._fleet())
                result = await self._carry_out(order, model)
            except OrderRefused as refused:
                result = WeightsOrdered(model=model, refusal=str(refused))
            except BusError as error:
                why = f"NATS did not store the order: {error or type(error).__name__}"
                result = WeightsOrdered(model=model, refusal=why)
        self._note(order, result)
        return result

    async def _carry_out(self, order: OrderWeights, model: str) -> WeightsOrdered:
        """Raises OrderRefused, BusError."""
        at_ms, before = self._clock.wall_ms(), self._of(model)
        # The same version may come twice, with other weights.
        weights = f"{order.version or at_ms}#{secrets.token_hex(NONCE_BYTES)}" if order.action in NAMES else ""
        changes = await self._change(order, reached(self._fleet(), model), weights)
        if order.action is WeightsAction.RESUME:
            changes = [
                change for change in changes if change.failure != ENDED
            ]  # It is not paused when it starts again.
        wanted = after(order, before, weights, at_ms)
        if wanted != before and (not changes or any(not change.failure for change in changes)):
            await (await self._store()).put(wanted)
            self._wanted[wanted.key] = wanted
        return WeightsOrdered(model=model, weights=self._of(model).weights, changes=changes)

    async def _change(self, order: OrderWeights, records: list[WorkerRecord], weights: str) -> list[WeightsChanged]:
        """All at once: the engines connect to a trainer, and receive from it, together. Raises OrderRefused."""
        orders: list[ChangeWeights] = []
        ranks = 0
        for record in records:
            orders.append(
                ChangeWeights(
                    worker_id=record.worker_id,
                    action=order.action,
                    mode=order.mode,
                    clear_cache=order.clear_cache,
                    path=order.path,
                    version=order.version,
                    payload=payload_for(order, ranks),
                    weights=weights,
                )
            )
            ranks += record.ranks
        async with asyncio.TaskGroup() as changing:
            tasks = [changing.create_task(self._ask(one), name=f"weights {one.worker_id}") for one in orders]
        return [task.result() for task in tasks]

    async def _ask(self, change: ChangeWeights) -> WeightsChanged:
        asked = self._bus.ask(CHANGE_WEIGHTS, change, timeout_s=CHANGE_S_MAX)
        try:
            return await self._reply(asked, change.worker_id)
        except NoReply as why:
            return WeightsChanged(worker_id=change.worker_id, epoch=Epoch(0), failure=str(why))

    async def _repeat(self) -> None:
        """Workers that have started since their model got its weights load them, too."""
        fleet = self._fleet()
        epochs = {each.record.worker_id: each.record.epoch for each in fleet}
        self._tries = Counter({one: count for one, count in self._tries.items() if epochs.get(one[0]) == one[1]})
        for record, wanted in lacking(list(self._wanted.values()), fleet):
            tried: Try = (record.worker_id, record.epoch, wanted.weights)
            if self._tries[tried] >= TRIES_MAX:
                continue
            self._tries[tried] += 1
            order = OrderWeights(
                action=WeightsAction.LOAD, model=wanted.model, path=wanted.path, version=wanted.version, by=wanted.by
            )
            async with self._changing:
                changes = await self._change(order, [record], wanted.weights)
            self._note(order, WeightsOrdered(model=wanted.model, weights=wanted.weights, changes=changes), again=True)

    def _note(self, order: OrderWeights, done: WeightsOrdered, *, again: bool = False) -> None:
        """The audit: this process's log has every order."""
        result = done.refusal or ", ".join(f"{one.worker_id}: {one.failure or 'done'}" for one in done.changes)
        what = (order.action.value, done.model, order.version or order.path)
        log.info("weights order by %r%s: %s %s %r: %s", order.by, ", again" if again else "", *what, result)
