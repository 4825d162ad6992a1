"""Which workers an order about a LoRA adapter concerns, and which workers still lack an adapter that is wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from shared.contracts.adapters import (
    NAME_CHARS_MAX,
    ORDER_WORKERS_MAX,
    PATH_CHARS_MAX,
    AdapterAction,
    OrderAdapter,
    WantedAdapter,
)
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.workers import FleetWorker, Role, WorkerPhase

BY_CHARS_MAX = 128
KEY_CHARS = 32


class Refused(Exception):
    """The order cannot be carried out; the message says why and what to do."""


def checked(order: OrderAdapter) -> OrderAdapter:
    """The order, if it may be stored and passed on. Raises Refused."""
    if not order.name or len(order.name) > NAME_CHARS_MAX or not order.name.isprintable():
        raise Refused(f"an adapter's name has 1 to {NAME_CHARS_MAX} characters")
    if order.action is AdapterAction.LOAD and not order.path:
        raise Refused("a path is needed: a folder, relative to the workers' WORKER_LORA_DIR")
    if len(order.path) > PATH_CHARS_MAX or not order.path.isprintable():
        raise Refused(f"a path has at most {PATH_CHARS_MAX} printable characters")
    if len(order.workers) > ORDER_WORKERS_MAX or not all(map(is_subject_token, order.workers)):
        raise Refused(f"workers are given by id, at most {ORDER_WORKERS_MAX}")
    by = "".join(one for one in order.by if one.isprintable())[:BY_CHARS_MAX]
    return msgspec.structs.replace(order, by=by, workers=sorted(set(order.workers)))


def model_of(order: OrderAdapter, fleet: Iterable[FleetWorker]) -> str:
    """The model that the order means. Raises Refused."""
    ready = [each for each in fleet if _computes(each)]
    if order.model:
        for each in ready:
            if order.model in each.record.models:
                return each.record.models[0]
        raise Refused(f"no worker of {order.model} is ready")
    named = [each for each in ready if not order.workers or each.record.worker_id in order.workers]
    models = sorted({each.record.models[0] for each in named})
    if not models:
        raise Refused("none of these workers is ready" if order.workers else "no worker is ready")
    if len(models) > 1:
        raise Refused(f"there are several models ({', '.join(models)}): name the one that it adapts")
    return models[0]


def targets(order: OrderAdapter, model: str, fleet: Iterable[FleetWorker]) -> list[WorkerId]:
    """The ready workers that the order concerns. Raises Refused if a worker that it names is not one of them."""
    ready = [each.record for each in fleet if _computes(each) and each.record.models[0] == model]
    if unknown := sorted(set(order.workers) - {record.worker_id for record in ready}):
        raise Refused(f"{', '.join(unknown)}: no such worker of {model} is ready")
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
    """What is wanted after this order; None: nothing. Raises Refused."""
    if before is None or not order.workers:
        return None
    if not before.workers:
        raise Refused(
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
        and each.record.models[0] == one.model
        and (not one.workers or each.record.worker_id in one.workers)
        and all(adapter.name != one.name for adapter in each.record.adapters)
    ]


def wanted_key(model: str, name: str) -> str:
    """One subject token for each adapter of each model."""
    return hashlib.sha256(f"{model}\0{name}".encode()).hexdigest()[:KEY_CHARS]


def _computes(worker: FleetWorker) -> bool:
    return worker.phase is WorkerPhase.READY and worker.record.role is not Role.STORE and bool(worker.record.models)
