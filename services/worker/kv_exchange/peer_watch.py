"""Follows the registry and keeps the handshakes of this worker's peers up to date."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from connector.messages import EngineCall, PeerConnected, PeerGone
from services.worker.kv_exchange.peers import PeerTable
from shared.bus.port import Bus, BusError, Envelope, watch_store
from shared.contracts.channels import KV_HANDSHAKE, WORKER_LOST, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import AskKvHandshake
from shared.contracts.workers import WorkerLost, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

ANSWER_S_MAX = 2.0
"""For a handshake. The peer's worker process answers it, not its engine."""


class PeerWatch:
    """Drives a ``PeerTable`` and tells the engine which peers it may read from (``tell``)."""

    def __init__(
        self, bus: Bus, clock: Clock, worker_id: WorkerId, table: PeerTable, tell: Callable[[EngineCall], None]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._worker_id = worker_id
        self._table = table
        self._tell = tell
        self._changed = asyncio.Event()
        self._all_read = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._notified_revision = 0
        """Revision of the records that the listeners know."""

    @property
    def records(self) -> list[WorkerRecord]:
        """Of the workers that exchange KV with this one, as registered."""
        return self._table.records

    def on_records(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a worker has joined, changed or left."""
        self._listeners.append(listener)

    async def all_read(self) -> None:
        """Wait until every registered worker is known."""
        await self._all_read.wait()

    async def open(self) -> None:
        """Subscribe; live when it returns."""
        await self._bus.subscribe(WORKER_LOST, self._on_lost)

    def want(self, worker_ids: list[WorkerId]) -> None:
        """Requests name workers that the engine is not connected to."""
        self._table.want(worker_ids, self._clock.now())
        self._changed.set()

    def connected(self, ends: list[PeerConnected]) -> None:
        """Attempts to connect have ended. After a failure, prompts that the peer holds are computed."""
        for end in ends:
            if end.failure:
                log.warning("the engine cannot connect to %s to read its KV: %s", end.worker_id, end.failure)
                self._table.refused(end.worker_id, end.epoch, self._clock.now())
                self._changed.set()
            else:
                log.info("connected to %s in %.0f ms", end.worker_id, end.seconds * 1000)

    async def follow(self) -> None:
        """Watch and ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_records(), name="watch-peers")
            while True:
                self._changed.clear()
                for worker_id in self._table.due(self._clock.now()):
                    tasks.create_task(self._ask(worker_id), name=f"ask-handshake-{worker_id}")
                self._end(self._table.expired(self._clock.now()))
                await self._until(self._table.next_at())

    async def _until(self, at: float) -> None:
        """Wait for that time, or for a change."""
        wait_s = None if at == math.inf else max(0.0, at - self._clock.now())
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _watch_records(self) -> None:
        async for entry in watch_store(self._bus, WORKER_RECORDS):
            if entry is None:
                self._all_read.set()
                continue
            if entry.value is None:
                self._table.missing(WorkerId(entry.key), self._clock.now())
            else:
                self._end(self._table.record(entry.value, self._clock.now()))
            self._changed.set()
            self._notify_listeners()

    async def _ask(self, worker_id: WorkerId) -> None:
        requested_at = self._clock.now()
        ask = AskKvHandshake(worker_id=worker_id, reader_id=self._worker_id)
        try:
            handshake = await self._bus.ask(KV_HANDSHAKE, ask, timeout_s=ANSWER_S_MAX)
        except BusError as error:
            log.debug("%s sent no handshake: %s", worker_id, error)
            self._table.failed(worker_id, self._clock.now())
        else:
            peers, gone = self._table.answered(worker_id, handshake, requested_at, self._clock.now())
            self._end(gone)
            if peers:
                self._tell(EngineCall(peers=peers))
        self._changed.set()

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._end(self._table.lost(lost.worker_id, lost.epoch))
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        if self._notified_revision == self._table.revision:
            return
        self._notified_revision = self._table.revision
        for listener in self._listeners:
            listener()

    def _end(self, gone: list[PeerGone]) -> None:
        if gone:
            self._tell(EngineCall(gone=gone))
