"""The worker's record in the registry: renewed while the process runs, removed when it ends."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from shared.bus.port import Bus, BusError, KeyValueStore, StoredValue, WrongRevision
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import WORKER_RECORD_TTL_S, WorkerPhase, WorkerRecord
from shared.runtime.service import WrongConfiguration

log = logging.getLogger("baton.worker")

RENEWALS_PER_TTL = 3
RETRY_S = 1.0
"""After a write that failed: NATS is away, or no orchestrator has made the registry yet."""
EPOCH_MAX = 2**53
"""No clock comes near it, and greater numbers do not fit everywhere."""


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
    if before is None or before.value is None:
        return Epoch(wall_ms)
    if before.value.epoch > EPOCH_MAX:
        log.warning("the registry has an impossible epoch of this worker, which is ignored: %d", before.value.epoch)
        return Epoch(wall_ms)
    return Epoch(max(wall_ms, before.value.epoch + 1))


class IdTaken(WrongConfiguration):
    """A process that began later has the same worker id. Both would take legs, and neither would get its answers."""

    def __init__(self, other: WorkerRecord) -> None:
        super().__init__(
            f"another process is worker {other.worker_id} now: it began later, on {other.host or 'an unknown host'} "
            f"(pid {other.pid}). This one stops. Give each worker an id of its own (WORKER_WORKER_ID), or run one only."
        )


class Registration:
    """Writes the record on each change and often enough that it never expires. Raises IdTaken.

    Every renewal writes the whole record, so that a registry that lost its memory soon has it back.
    """

    def __init__(self, bus: Bus, record: WorkerRecord) -> None:
        self.record = record
        self._bus = bus
        self._records: KeyValueStore[WorkerRecord] | None = None
        self._revision = 0
        """Of the last written record; a renewal over another one shows that another process writes it."""
        self._is_over = False
        """The record was removed, or belongs to another process."""
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
            self._is_over = True
            try:
                if self._records is not None and self._revision:
                    await self._records.delete(self.record.worker_id, self._revision)
            except BusError as error:
                log.info("the record was not removed, it will expire: %s", error)

    async def _write(self) -> bool:
        async with self._writing:
            if self._is_over:
                return True
            try:
                if self._records is None:
                    self._records = await self._bus.key_value_store(WORKER_RECORDS)
                self._revision = await self._put(self._records)
            except BusError as error:
                log.warning("the registry could not be written, trying again: %s", error)
                return False
            return True

    async def _put(self, records: KeyValueStore[WorkerRecord]) -> int:
        if self._revision:
            try:
                return await records.update(self.record, self._revision)
            except WrongRevision:
                self._must_be_newest(await records.get(self.record.worker_id))
        return await records.put(self.record)

    def _must_be_newest(self, found: StoredValue[WorkerRecord] | None) -> None:
        """The record is also not as it was last written if it has expired, or the reply to a write was lost."""
        other = found.value if found is not None else None
        if other is not None and _began(other) > _began(self.record):
            self._is_over, self._revision = True, 0
            raise IdTaken(other)


def _began(record: WorkerRecord) -> tuple[Epoch, str, int]:
    return record.epoch, record.host, record.pid
