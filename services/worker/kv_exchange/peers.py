"""The workers that this one may exchange KV with, from the registry, and when to ask each for its handshake.

A peer is asked when its record says PROBING, every ``KEEP_ALIVE_S``, sooner after a failure, and at once when a request
names it as a source; never twice at a time. The engine learns of a peer when a process that may die has tried its NIXL
metadata. A peer that can end an engine is refused for ``REFUSED_S``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from connector.layout.bounds import why_out_of_bounds
from connector.messages import EngineCall, Peer, PeerConnected, PeerGone
from services.worker.kv_exchange.trials import Outcome, Verdict
from shared.bus.port import Bus, BusError, Envelope, watch_store
from shared.contracts.channels import KV_HANDSHAKE, WORKER_LOST, WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import AskKvHandshake, KvHandshake
from shared.contracts.workers import Fingerprint, WorkerLost, WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

PEERS_MAX = 1024
"""Peers that are connected; prompts that further workers hold are computed."""
ASKS_AT_ONCE_MAX = 8
KEEP_ALIVE_S = 30.0
RETRY_S = 1.0
"""Pause after a request for a handshake without a response."""
RECONNECT_S = 5.0
"""Pause after an engine, or a trial, could not connect to a peer whose handshake it had."""
REFUSED_S = 300.0
"""Time for which a peer, in whichever epoch, is not asked after its handshake was out of bounds or would have ended the
engine, or after an engine died while it connected to it."""
CONNECTING_S_MAX = 120.0
"""Time after which an attempt to connect has ended, even if the engine's report of it was lost."""
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
    connecting_since: float = -math.inf
    """When the engine began to connect to it; minus infinity: it has ended."""
    transport: str = ""
    """See ``Verdict.transport``."""


class PeerTable:
    """Pure: records and handshakes in, engine calls out. Times are on this machine's clock."""

    def __init__(self, worker_id: WorkerId, own: Fingerprint) -> None:
        """``own``: the worker's fingerprint, of which the ``base_key`` counts: engines stay connected while their
        weights change.
        """
        self._worker_id = worker_id
        self._own = own
        self._fingerprint = own.base_key()
        self._weights = ""
        self._known: dict[WorkerId, Known] = {}
        self.revision = 0
        """Incremented whenever ``records`` change."""
        self._records: dict[WorkerId, WorkerRecord] = {}
        self._refused_until: dict[WorkerId, float] = {}

    @property
    def records(self) -> list[WorkerRecord]:
        """Records of the workers with the same fingerprint that exchange KV, without refused ones."""
        return [
            record
            for record in self._records.values()
            if record.worker_id not in self._refused_until and record.fingerprint.weights == self._weights
        ]

    def set_weights(self, weights: str) -> None:
        """Set the worker's own (see ``Fingerprint.weights``)."""
        self._weights = weights
        self.revision += 1

    @property
    def connected(self) -> int:
        """Number of peers that the engine knows."""
        return sum(known.connected for known in self._known.values())

    def record(self, record: WorkerRecord, now: float) -> list[PeerGone]:
        if record.worker_id == self._worker_id:
            return []
        fits = record.phase in EXCHANGING and record.fingerprint.base_key() == self._fingerprint
        known = self._known.get(record.worker_id)
        if known is not None and record.epoch < known.epoch:
            return []
        self._set_record(record.worker_id, record if fits else None)
        if known is not None and record.epoch == known.epoch and fits:
            known.missing_since = math.inf
            return []
        gone = self._forget(record.worker_id)
        if fits and len(self._known) < PEERS_MAX:
            not_before = self._refused_until.get(record.worker_id, now)
            self._known[record.worker_id] = Known(record.epoch, due_at=not_before, not_before=not_before)
        return gone

    def apart(self, record: WorkerRecord) -> str:
        """Why it is no peer, though it serves the same model: it moves KV in another way. Empty: it may be one."""
        ours, theirs = self._own, record.fingerprint
        if record.phase not in EXCHANGING or (ours.model, ours.revision) != (theirs.model, theirs.revision):
            return ""
        if ours.kv_backend == theirs.kv_backend:
            return ""
        return (
            f"no KV moves between it and this worker: it has WORKER_KV_BACKEND={theirs.kv_backend}, this one "
            f"{ours.kv_backend}. Give both the same one"
        )

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
        self, worker_id: WorkerId, handshake: KvHandshake, requested_at: float, now: float, transport: str = ""
    ) -> tuple[list[Peer], list[PeerGone]]:
        """A handshake arrived. One of an earlier epoch, or of another worker, counts as a failure."""
        known = self._known.get(worker_id)
        if known is None:
            return [], []
        is_its_own = handshake.worker_id == worker_id and handshake.fingerprint == self._fingerprint
        if not is_its_own or handshake.epoch < known.epoch or not math.isfinite(handshake.clock_s):
            self.failed(worker_id, now)
            return [], []
        is_new = not known.connected or handshake.epoch > known.epoch
        gone = self._forget(worker_id) if handshake.epoch > known.epoch else []
        self._known[worker_id] = Known(
            handshake.epoch,
            due_at=now + KEEP_ALIVE_S,
            missing_since=known.missing_since,
            connected=True,
            connecting_since=now if is_new else known.connecting_since,
            transport=transport,
        )
        # The peer read its clock after the ask was sent: with a later time here the bound would be too small.
        return [Peer(handshake=handshake, clock_ahead_s=handshake.clock_s - requested_at)], gone

    def failed(self, worker_id: WorkerId, now: float, pause_s: float = RETRY_S) -> None:
        """It sent no handshake, or one that the engine does not get."""
        if known := self._known.get(worker_id):
            known.is_requested = False
            known.due_at = known.not_before = now + pause_s

    def opened(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """The engine has connected to it."""
        known = self._known.get(worker_id)
        if known is not None and known.epoch == epoch:
            known.connecting_since = -math.inf

    def failed_to_open(self, worker_id: WorkerId, epoch: Epoch, now: float) -> None:
        """The engine could not connect to it."""
        known = self._known.get(worker_id)
        if known is not None and known.epoch == epoch:
            known.connected = False
            known.connecting_since = -math.inf
            known.due_at = known.not_before = now + RECONNECT_S

    def transport_from(self, worker_id: WorkerId) -> str:
        """What moves bytes from there. Empty: unknown."""
        known = self._known.get(worker_id)
        return known.transport if known is not None else ""

    def is_settled(self, worker_id: WorkerId, now: float) -> bool:
        """Whether the engine has connected to it, or cannot for now."""
        known = self._known.get(worker_id)
        if known is None or (known.connected and known.connecting_since == -math.inf):
            return True
        return not known.connected and now < known.not_before

    def connecting(self, now: float) -> list[WorkerId]:
        """Peers that the engine is connecting to."""
        since = now - CONNECTING_S_MAX
        return [worker_id for worker_id, known in self._known.items() if known.connecting_since > since]

    def refuse(self, worker_id: WorkerId, until: float) -> list[PeerGone]:
        """Do not ask the peer until then, whatever its epoch; the engine is to forget it, if it knows it."""
        if len(self._refused_until) < PEERS_MAX:
            self._refused_until[worker_id] = until
            self.revision += 1
        known = self._known.get(worker_id)
        gone = self._forget(worker_id)
        if known is not None:
            self._known[worker_id] = Known(
                known.epoch, due_at=until, not_before=until, missing_since=known.missing_since
            )
        return gone

    def expired(self, now: float) -> list[PeerGone]:
        """Give up peers whose records did not come back, and admit those that have been refused for long enough."""
        for worker_id in [one for one, until in self._refused_until.items() if until <= now]:
            del self._refused_until[worker_id]
            self.revision += 1
        away = [worker_id for worker_id, known in self._known.items() if now >= known.missing_since + MISSING_S_MAX]
        return [gone for worker_id in away for gone in self._forget(worker_id)]

    def next_at(self) -> float:
        """When ``due`` or ``expired`` may return something; infinity: only after a change."""
        dues = [known.due_at for known in self._known.values() if not known.is_requested] if self._slots() else []
        ends = [known.missing_since + MISSING_S_MAX for known in self._known.values()]
        return min([*dues, *ends, *self._refused_until.values()], default=math.inf)

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
    """Drives a ``PeerTable`` and tells the engine which peers it may read from (``tell``), after a trial of each
    (``try_peer``).
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        worker_id: WorkerId,
        table: PeerTable,
        tell: Callable[[EngineCall], None],
        try_peer: Callable[[KvHandshake], Awaitable[Verdict]],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._worker_id = worker_id
        self._table = table
        self._tell = tell
        self._try_peer = try_peer
        self._changed = asyncio.Event()
        self._waiting: set[asyncio.Event] = set()
        """Each is set when the state of a peer may have changed."""
        self._all_read = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._notified_revision = 0
        """Revision of the records that the listeners know."""
        self._apart: dict[WorkerId, Epoch] = {}
        """Workers of which the log says why they are no peers."""

    @property
    def records(self) -> list[WorkerRecord]:
        """Records of the workers that exchange KV with this one."""
        return self._table.records

    def on_records(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a worker has joined, changed or left."""
        self._listeners.append(listener)

    def set_weights(self, weights: str) -> None:
        """The engine has other weights: no worker has its KV until it has the same ones."""
        self._table.set_weights(weights)
        self._notify_listeners()

    async def all_read(self) -> None:
        """Wait until every registered worker is known."""
        await self._all_read.wait()

    async def open(self) -> None:
        """Subscribe; live when it returns."""
        await self._bus.subscribe(WORKER_LOST, self._on_lost)

    def want(self, worker_ids: list[WorkerId]) -> None:
        """Requests name workers that the engine is not connected to."""
        self._table.want(worker_ids, self._clock.now())
        self._wake()

    def connected(self, ends: list[PeerConnected]) -> None:
        """Attempts to connect have ended. After a failure, prompts that the peer holds are computed."""
        for end in ends:
            if end.failure:
                log.warning("the engine cannot connect to %s to read its KV: %s", end.worker_id, end.failure)
                self._table.failed_to_open(end.worker_id, end.epoch, self._clock.now())
            else:
                self._table.opened(end.worker_id, end.epoch)
                log.info("connected to %s in %.0f ms", end.worker_id, end.seconds * 1000)
        if ends:
            self._wake()

    async def settled(self, worker_id: WorkerId, s_max: float) -> None:
        """Wait until the engine has connected to it, or cannot for now, but no longer than ``s_max``."""
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(s_max):
                await self.all_read()
                while not self._table.is_settled(worker_id, self._clock.now()):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            log.info("the engine has not connected to %s within %g s", worker_id, s_max)
        finally:
            self._waiting.discard(changed)

    def transport_from(self, worker_id: WorkerId) -> str:
        """What moves bytes from there. Empty: unknown."""
        return self._table.transport_from(worker_id)

    def connecting(self) -> list[WorkerId]:
        """Peers that the engine is connecting to."""
        return self._table.connecting(self._clock.now())

    def refuse(self, worker_id: WorkerId, seconds: float) -> None:
        """Do not connect to it for so long."""
        log.warning("%s is not connected to for %.0f s", worker_id, seconds)
        self._end(self._table.refuse(worker_id, self._clock.now() + seconds))
        self._wake()
        self._notify_listeners()

    async def follow(self) -> None:
        """Watch and ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_records(), name="watch-peers")
            while True:
                self._changed.clear()
                for worker_id in self._table.due(self._clock.now()):
                    tasks.create_task(self._ask(worker_id), name=f"ask-handshake-{worker_id}")
                self._end(self._table.expired(self._clock.now()))
                self._notify_listeners()
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
                self._note_apart(entry.value)
                self._end(self._table.record(entry.value, self._clock.now()))
            self._wake()
            self._notify_listeners()

    def _note_apart(self, record: WorkerRecord) -> None:
        """Log once for each process, as records are written every few seconds."""
        if (why := self._table.apart(record)) and self._apart.get(record.worker_id) != record.epoch:
            if len(self._apart) >= PEERS_MAX:
                del self._apart[next(iter(self._apart))]
            self._apart[record.worker_id] = record.epoch
            log.warning("%s serves the same model, but %s", record.worker_id, why)

    async def _ask(self, worker_id: WorkerId) -> None:
        requested_at = self._clock.now()
        ask = AskKvHandshake(worker_id=worker_id, reader_id=self._worker_id)
        try:
            handshake = await self._bus.ask(KV_HANDSHAKE, ask, timeout_s=ANSWER_S_MAX)
        except BusError as error:
            log.debug("%s sent no handshake: %s", worker_id, error)
            self._table.failed(worker_id, self._clock.now())
        else:
            await self._take(worker_id, handshake, requested_at)
        self._wake()

    async def _take(self, worker_id: WorkerId, handshake: KvHandshake, requested_at: float) -> None:
        if why := why_out_of_bounds(handshake):
            log.warning("the handshake of %s is not possible: %s", worker_id, why)
            self.refuse(worker_id, REFUSED_S)
            return
        verdict = await self._try_peer(handshake)
        if verdict.outcome is Outcome.DEADLY:
            log.warning("the handshake of %s would end the engine: %s", worker_id, verdict.why)
            self.refuse(worker_id, REFUSED_S)
        elif verdict.outcome is Outcome.REFUSED:
            log.warning("the engine cannot connect to %s to read its KV: %s", worker_id, verdict.why)
            self._table.failed(worker_id, self._clock.now(), RECONNECT_S)
        else:
            now, transport = self._clock.now(), verdict.transport
            peers, gone = self._table.answered(worker_id, handshake, requested_at, now, transport)
            self._end(gone)
            if peers:
                self._tell(EngineCall(peers=peers))

    def _wake(self) -> None:
        self._changed.set()
        for waiting in self._waiting:
            waiting.set()

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._end(self._table.lost(lost.worker_id, lost.epoch))
        self._wake()
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
