"""Who else there is: follows the registry, asks for handshakes, keeps them fresh."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from connector.messages import EngineCall, PeerConnected, PeerGone
from services.worker.kv_exchange.peers import RETRY_S, PeerTable
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import KV_HANDSHAKE, WORKER_LOST, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.kv_handshake import AskKvHandshake
from shared.contracts.workers import WORKER_RECORD_TTL_S, WorkerLost, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

ANSWER_S_MAX = 2.0
"""For a handshake: the peer's service answers it, not its engine."""


class PeerWatch:
    """Keeps the book, and tells the engine whom it may read from (``tell``)."""

    def __init__(
        self, bus: Bus, clock: Clock, worker_id: WorkerId, book: PeerTable, tell: Callable[[EngineCall], None]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._worker_id = worker_id
        self._book = book
        self._tell = tell
        self._changed = asyncio.Event()
        self._all_read = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._told = 0
        """The revision of the records that the listeners know."""

    @property
    def records(self) -> list[WorkerRecord]:
        """Of those whose KV can be read here, as they registered."""
        return self._book.records

    def on_records(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a worker has joined, changed or left."""
        self._listeners.append(listener)

    async def all_read(self) -> None:
        """Wait until everybody who is registered is known."""
        await self._all_read.wait()

    async def open(self) -> None:
        """Listen; live when it returns."""
        await self._bus.subscribe(WORKER_LOST, self._on_lost)

    def want(self, worker_ids: list[WorkerId]) -> None:
        """Requests name workers that the engine cannot read from yet."""
        self._book.want(worker_ids, self._clock.now())
        self._changed.set()

    def connected(self, ends: list[PeerConnected]) -> None:
        """The engine tried. One that cannot be read from costs every prompt that it holds."""
        for end in ends:
            if end.failure:
                log.warning("KV of %s cannot be read: %s", end.worker_id, end.failure)
                self._book.refused(end.worker_id, end.epoch, self._clock.now())
                self._changed.set()
            else:
                log.info("connected to %s in %.0f ms", end.worker_id, end.seconds * 1000)

    async def follow(self) -> None:
        """Watch and ask, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_records(), name="watch-peers")
            while True:
                self._changed.clear()
                for worker_id in self._book.due(self._clock.now()):
                    tasks.create_task(self._ask(worker_id), name=f"ask-handshake-{worker_id}")
                self._end(self._book.expired(self._clock.now()))
                await self._until(self._book.next_at())

    async def _until(self, at: float) -> None:
        """Wait for that time, or for a change."""
        wait_s = None if at == math.inf else max(0.0, at - self._clock.now())
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _watch_records(self) -> None:
        while True:
            try:
                kept = await self._bus.key_value_store(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
                async for entry in kept.watch():
                    if entry is None:
                        self._all_read.set()
                        continue
                    if entry.value is None:
                        self._book.missing(WorkerId(entry.key), self._clock.now())
                    else:
                        self._end(self._book.record(entry.value, self._clock.now()))
                    self._changed.set()
                    self._tell_records()
            except BusError as error:
                log.warning("the registry cannot be watched, trying again: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _ask(self, worker_id: WorkerId) -> None:
        asked_at = self._clock.now()
        ask = AskKvHandshake(worker_id=worker_id, reader_id=self._worker_id)
        try:
            handshake = await self._bus.ask(KV_HANDSHAKE, ask, timeout_s=ANSWER_S_MAX)
        except BusError as error:
            log.debug("%s does not describe itself: %s", worker_id, error)
            self._book.failed(worker_id, self._clock.now())
        else:
            peers, gone = self._book.answered(worker_id, handshake, asked_at, self._clock.now())
            self._end(gone)
            if peers:
                self._tell(EngineCall(peers=peers))
        self._changed.set()

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._end(self._book.lost(lost.worker_id, lost.epoch))
        self._tell_records()

    def _tell_records(self) -> None:
        if self._told == self._book.revision:
            return
        self._told = self._book.revision
        for listener in self._listeners:
            listener()

    def _end(self, gone: list[PeerGone]) -> None:
        if gone:
            self._tell(EngineCall(gone=gone))
