"""The partner of a store: the first worker of the store's model. The store keeps blocks of its fingerprint only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from services.worker.engines.store.records import BlockShape, shape_of
from shared.bus.port import Bus, BusError
from shared.contracts.channels import KV_HANDSHAKE, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import AskKvHandshake
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

log = logging.getLogger("baton.worker")

POLL_S = 1.0
"""Between two reads of the registry."""
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
                if handshake.fingerprint == record.fingerprint.key():
                    return Partner(record, shape_of(handshake))
            except (BusError, ValueError) as error:
                log.info("%s sent no usable handshake: %s", record.worker_id, error)
        await asyncio.sleep(POLL_S)


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
