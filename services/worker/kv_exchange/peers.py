"""The workers that this one may exchange KV with, from the registry, and when to ask each for its handshake.

A peer is asked when its record says PROBING, every ``KEEP_ALIVE_S``, sooner after a failure, and at once when a request
names it as a source; never twice at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connector.messages import EngineCall, Peer, PeerConnected, PeerGone
from shared.bus.port import Bus, BusError, Envelope, watch_store
from shared.contracts.channels import KV_HANDSHAKE, WORKER_LOST, WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import AskKvHandshake, KvHandshake
from shared.contracts.workers import WorkerLost, WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

PEERS_MAX = 1024
"""Peers that are connected; prompts that further workers hold are computed."""
ASKS_AT_ONCE_MAX = 8
KEEP_ALIVE_S = 30.0
RETRY_S = 1.0
"""Pause after a request for a handshake without a response."""
RECONNECT_S = 5.0
"""Pause after an engine could not connect to a peer whose handshake it had."""
MISSING_S_MAX = 5.0
"""Time after which a peer whose record has vanished is given up. If NATS lost its data, the record is back sooner."""
EXCHANGING = frozenset({WorkerPhase.PROBING, WorkerPhase.READY, WorkerPhase.DRAINING})
"""Phases in which workers exchange KV: a probing worker runs self-tests, a draining one still holds blocks that others
may want."""


@dataclass(slots=True)
class Known:
    """One epoch of one worker."""

    epoch: Epoch
    due_at: float
    not_before: float = 0.0
    """Instant before which the peer is not asked again after a failure, even for a request."""
    is_requested: bool = False
    missing_since: float = math.inf
    connected: bool = False
    """Whether the engine knows the peer."""


class PeerTable:
    """Pure: records and handshakes in, engine calls out. Times are on this machine's clock."""

    def __init__(self, worker_id: WorkerId, fingerprint: str) -> None:
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._known: dict[WorkerId, Known] = {}
        self.revision = 0
        """Incremented whenever ``records`` change."""
        self._records: dict[WorkerId, WorkerRecord] = {}

    @property
    def records(self) -> list[WorkerRecord]:
        """Records of the workers with the same fingerprint that exchange KV."""
        return list(self._records.values())

    @property
    def connected(self) -> int:
        """Number of peers that the engine knows."""
        return sum(known.connected for known in self._known.values())

    def record(self, record: WorkerRecord, now: float) -> list[PeerGone]:
        if record.worker_id == self._worker_id:
            return []
        fits = record.phase in EXCHANGING and record.fingerprint.key() == self._fingerprint
        known = self._known.get(record.worker_id)
        if known is not None and record.epoch < known.epoch:
            return []
        self._set_record(record.worker_id, record if fits else None)
        if known is not None and record.epoch == known.epoch and fits:
            known.missing_since = math.inf
            return []
        gone = self._forget(record.worker_id)
        if fits and len(self._known) < PEERS_MAX:
            self._known[record.worker_id] = Known(record.epoch, due_at=now)
        return gone

    def missing(self, worker_id: WorkerId, now: float) -> None:
        self._set_record(worker_id, None)
        if known := self._known.get(worker_id):
            known.missing_since = min(known.missing_since, now)

    def lost(self, worker_id: WorkerId, epoch: Epoch) -> list[PeerGone]:
        """The orchestrator declared that epoch lost."""
        if (record := self._records.get(worker_id)) is not None and record.epoch <= epoch:
            self._set_record(worker_id, None)
        known = self._known.get(worker_id)
        return self._forget(worker_id) if known is not None and known.epoch <= epoch else []

    def want(self, worker_ids: Iterable[WorkerId], now: float) -> None:
        """Requests name them as sources, and the engine is not connected to them."""
        for worker_id in worker_ids:
            if known := self._known.get(worker_id):
                known.due_at = min(known.due_at, max(now, known.not_before))

    def due(self, now: float) -> list[WorkerId]:
        """Peers to ask now; they count as asked from now on."""
        waiting = [
            (known.due_at, worker_id)
            for worker_id, known in self._known.items()
            if known.due_at <= now and not known.is_requested
        ]
        chosen = [worker_id for _due_at, worker_id in sorted(waiting)[: self._slots()]]
        for worker_id in chosen:
            self._known[worker_id].is_requested = True
        return chosen

    def answered(
        self, worker_id: WorkerId, handshake: KvHandshake, requested_at: float, now: float
    ) -> tuple[list[Peer], list[PeerGone]]:
        """A handshake arrived. One of an earlier epoch, or of another worker, counts as a failure."""
        known = self._known.get(worker_id)
        if known is None:
            return [], []
        is_its_own = handshake.worker_id == worker_id and handshake.fingerprint == self._fingerprint
        if not is_its_own or handshake.epoch < known.epoch or not math.isfinite(handshake.clock_s):
            self.failed(worker_id, now)
            return [], []
        gone = self._forget(worker_id) if handshake.epoch > known.epoch else []
        self._known[worker_id] = Known(
            handshake.epoch, due_at=now + KEEP_ALIVE_S, missing_since=known.missing_since, connected=True
        )
        # The peer read its clock after the ask was sent: with a later time here the bound would be too small.
        return [Peer(handshake=handshake, clock_ahead_s=handshake.clock_s - requested_at)], gone

    def failed(self, worker_id: WorkerId, now: float) -> None:
        """It sent no handshake."""
        if known := self._known.get(worker_id):
            known.is_requested = False
            known.due_at = known.not_before = now + RETRY_S

    def refused(self, worker_id: WorkerId, epoch: Epoch, now: float) -> None:
        """The engine could not connect to it."""
        known = self._known.get(worker_id)
        if known is not None and known.epoch == epoch:
            known.connected = False
            known.due_at = known.not_before = now + RECONNECT_S

    def expired(self, now: float) -> list[PeerGone]:
        """Give up peers whose records did not come back."""
        away = [worker_id for worker_id, known in self._known.items() if now >= known.missing_since + MISSING_S_MAX]
        return [gone for worker_id in away for gone in self._forget(worker_id)]

    def next_at(self) -> float:
        """When ``due`` or ``expired`` may return something; infinity: only after a change."""
        dues = [known.due_at for known in self._known.values() if not known.is_requested] if self._slots() else []
        ends = [known.missing_since + MISSING_S_MAX for known in self._known.values()]
        return min([*dues, *ends], default=math.inf)

    def _set_record(self, worker_id: WorkerId, record: WorkerRecord | None) -> None:
        if self._records.get(worker_id) == record:
            return
        self.revision += 1
        self._records.pop(worker_id, None)
        if record is not None and len(self._records) < PEERS_MAX:
            self._records[worker_id] = record

    def _slots(self) -> int:
        """How many further peers may be asked now."""
        return max(0, ASKS_AT_ONCE_MAX - sum(known.is_requested for known in self._known.values()))

    def _forget(self, worker_id: WorkerId) -> list[PeerGone]:
        known = self._known.pop(worker_id, None)
        return [PeerGone(worker_id=worker_id, epoch=known.epoch)] if known is not None and known.connected else []


log = logging.getLogger("baton.worker")

ANSWER_S_MAX = 2.0
"""Time limit for a handshake. The peer's worker process answers it, not its engine."""


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
        """Records of the workers that exchange KV with this one."""
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
