"""The worker's record in the registry: renewed while the process runs, removed when it ends."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from shared.bus.port import Bus, BusError, KeyValueStore
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import WORKER_RECORD_TTL_S, WorkerPhase, WorkerRecord

log = logging.getLogger("baton.worker")

RENEWALS_PER_TTL = 3
RETRY_S = 1.0
"""After a write that failed: NATS is away, or no orchestrator has made the registry yet."""


async def new_epoch(bus: Bus, worker_id: WorkerId, wall_ms: int) -> Epoch:
    """The epoch of a process that starts now. Other services ignore epochs older than the newest they know, and the
    machine's clock may have been set back: while the registry has the earlier epoch, the new one is greater.
    """
    try:
        records = await bus.key_value_store(WORKER_RECORDS)
        before = await records.get(worker_id)
    except BusError as error:
        log.info("the registry cannot be asked for the earlier epoch: %s", error)
        return Epoch(wall_ms)
    return Epoch(wall_ms if before is None or before.value is None else max(wall_ms, before.value.epoch + 1))


class Registration:
    """Writes the record on each change and often enough that it never expires.

    Every renewal writes the whole record, so that a registry that lost its memory soon has it back.
    """

    def __init__(self, bus: Bus, record: WorkerRecord) -> None:
        self.record = record
        self._bus = bus
        self._records: KeyValueStore[WorkerRecord] | None = None
        self._writing = asyncio.Lock()
        self._is_changed = asyncio.Event()
        bus.on_reconnect(self._is_changed.set)

    async def update(self, record: WorkerRecord) -> None:
        """Write this record now; if NATS is unreachable, after the reconnect."""
        self.record = record
        await self._write()

    async def follow(self) -> None:
        """Renew until cancelled."""
        while True:
            is_written = await self._write()
            self._is_changed.clear()
            try:
                async with asyncio.timeout(WORKER_RECORD_TTL_S / RENEWALS_PER_TTL if is_written else RETRY_S):
                    await self._is_changed.wait()
            except TimeoutError:
                pass

    async def remove(self) -> None:
        """The worker ends. Nothing writes the record afterwards."""
        async with self._writing:
            self.record = msgspec.structs.replace(self.record, phase=WorkerPhase.GONE)
            try:
                if self._records is not None:
                    await self._records.delete(self.record.worker_id)
            except BusError as error:
                log.info("the record was not removed, it will expire: %s", error)

    async def _write(self) -> bool:
        async with self._writing:
            if self.record.phase is WorkerPhase.GONE:
                return True
            try:
                if self._records is None:
                    self._records = await self._bus.key_value_store(WORKER_RECORDS)
                await self._records.put(self.record)
            except BusError as error:
                log.warning("the registry could not be written, trying again: %s", error)
                return False
            return True
