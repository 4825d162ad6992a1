"""Whom this worker may exchange KV with, and whose handshake is due.

A peer is asked as soon as its record says PROBING, again in ``KEEP_ALIVE_S``, sooner after a failure, and at once when
a request wants it. Nobody is asked twice at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from connector.messages import Peer, PeerGone
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_handshake import KvHandshake
from shared.contracts.workers import WorkerPhase, WorkerRecord

PEERS_MAX = 1024
"""Workers beyond that are not connected; prompts that they hold are computed."""
ASKS_AT_ONCE_MAX = 8
KEEP_ALIVE_S = 30.0
RETRY_S = 1.0
"""After an ask that nobody answered."""
RECONNECT_S = 5.0
"""After an engine could not connect to a peer that described itself."""
MISSING_S_MAX = 5.0
"""A peer whose record vanished is given up after that: when NATS lost its memory, its record is back sooner."""
EXCHANGING = frozenset({WorkerPhase.PROBING, WorkerPhase.READY, WorkerPhase.DRAINING})
"""A probing worker reads and is read to prove that it can; a draining one still holds what others may want."""


@dataclass(slots=True)
class Known:
    """One life of one worker."""

    epoch: Epoch
    due_at: float
    not_before: float = 0.0
    """After a failure, even when it is wanted."""
    is_asked: bool = False
    missing_since: float = math.inf
    connected: bool = False
    """The engine was told of it."""


class PeerTable:
    """See the module. Records and answers in, engine calls out; times are this machine's."""

    def __init__(self, worker_id: WorkerId, fingerprint: str) -> None:
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._known: dict[WorkerId, Known] = {}
        self.revision = 0
        """Grows when ``records`` change."""
        self._records: dict[WorkerId, WorkerRecord] = {}

    @property
    def records(self) -> list[WorkerRecord]:
        """Of those whose KV can be read here, and who can read ours, as they registered."""
        return list(self._records.values())

    @property
    def connected(self) -> int:
        """Peers that the engine was told of."""
        return sum(known.connected for known in self._known.values())

    def record(self, record: WorkerRecord, now: float) -> list[PeerGone]:
        """A worker's record was written."""
        if record.worker_id == self._worker_id:
            return []
        fits = record.phase in EXCHANGING and record.fingerprint.key() == self._fingerprint
        known = self._known.get(record.worker_id)
        if known is not None and record.epoch < known.epoch:
            return []
        self._note(record.worker_id, record if fits else None)
        if known is not None and record.epoch == known.epoch and fits:
            known.missing_since = math.inf
            return []
        gone = self._forget(record.worker_id)
        if fits and len(self._known) < PEERS_MAX:
            self._known[record.worker_id] = Known(record.epoch, due_at=now)
        return gone

    def missing(self, worker_id: WorkerId, now: float) -> None:
        """A worker's record was removed or expired."""
        self._note(worker_id, None)
        if known := self._known.get(worker_id):
            known.missing_since = min(known.missing_since, now)

    def lost(self, worker_id: WorkerId, epoch: Epoch) -> list[PeerGone]:
        """That life of it is over for certain."""
        if (record := self._records.get(worker_id)) is not None and record.epoch <= epoch:
            self._note(worker_id, None)
        known = self._known.get(worker_id)
        return self._forget(worker_id) if known is not None and known.epoch <= epoch else []

    def want(self, worker_ids: Iterable[WorkerId], now: float) -> None:
        """Requests name them as sources, and the engine cannot read from them yet."""
        for worker_id in worker_ids:
            if known := self._known.get(worker_id):
                known.due_at = min(known.due_at, max(now, known.not_before))

    def due(self, now: float) -> list[WorkerId]:
        """Whom to ask now; they count as asked."""
        waiting = [
            (known.due_at, worker_id)
            for worker_id, known in self._known.items()
            if known.due_at <= now and not known.is_asked
        ]
        chosen = [worker_id for _due_at, worker_id in sorted(waiting)[: self._free()]]
        for worker_id in chosen:
            self._known[worker_id].is_asked = True
        return chosen

    def answered(
        self, worker_id: WorkerId, handshake: KvHandshake, asked_at: float, now: float
    ) -> tuple[list[Peer], list[PeerGone]]:
        """It described itself. An answer of an earlier life, or of somebody else, is none."""
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
        # The answer's clock was read after the question left: a later reading of ours would make the bound too small.
        return [Peer(handshake=handshake, clock_ahead_s=handshake.clock_s - asked_at)], gone

    def failed(self, worker_id: WorkerId, now: float) -> None:
        """It did not answer."""
        if known := self._known.get(worker_id):
            known.is_asked = False
            known.due_at = known.not_before = now + RETRY_S

    def refused(self, worker_id: WorkerId, epoch: Epoch, now: float) -> None:
        """The engine could not connect to it, and forgot it."""
        known = self._known.get(worker_id)
        if known is not None and known.epoch == epoch:
            known.connected = False
            known.due_at = known.not_before = now + RECONNECT_S

    def expired(self, now: float) -> list[PeerGone]:
        """Peers whose records did not come back."""
        away = [worker_id for worker_id, known in self._known.items() if now >= known.missing_since + MISSING_S_MAX]
        return [gone for worker_id in away for gone in self._forget(worker_id)]

    def next_at(self) -> float:
        """When to look again; infinity: when something happens."""
        dues = [known.due_at for known in self._known.values() if not known.is_asked] if self._free() else []
        ends = [known.missing_since + MISSING_S_MAX for known in self._known.values()]
        return min([*dues, *ends], default=math.inf)

    def _note(self, worker_id: WorkerId, record: WorkerRecord | None) -> None:
        if self._records.get(worker_id) == record:
            return
        self.revision += 1
        self._records.pop(worker_id, None)
        if record is not None and len(self._records) < PEERS_MAX:
            self._records[worker_id] = record

    def _free(self) -> int:
        """How many may be asked beside those that are."""
        return max(0, ASKS_AT_ONCE_MAX - sum(known.is_asked for known in self._known.values()))

    def _forget(self, worker_id: WorkerId) -> list[PeerGone]:
        known = self._known.pop(worker_id, None)
        return [PeerGone(worker_id=worker_id, epoch=known.epoch)] if known is not None and known.connected else []
