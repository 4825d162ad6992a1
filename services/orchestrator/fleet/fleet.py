"""The fleet: reads records, load reports and the clock as events of each worker's life (see ``lifecycle``).

Phases come from records alone, which arrive in order; a load report proves life and says how busy the worker is. So
two sources never argue about a phase. Everything from an older epoch than the one known is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.orchestrator.fleet.lifecycle import SAYS, Event, Worker, decide
from shared.contracts.ids import WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import FleetWorker, WorkerLost, WorkerPhase, WorkerRecord

OVER = (WorkerPhase.LOST, WorkerPhase.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How patient the orchestrator is, in seconds."""

    silence_s_max: float = 3.0
    unregistered_s_max: float = 10.0
    """A worker that speaks but has no record is given so long to write it again (after an empty NATS, say)."""
    remember_s: float = 60.0
    """Lost and gone workers are shown for so long."""
    deaf_s_max: float = 1.8
    """The leader's fleet state, sent once a second, is heard at least so often, or silence means nothing."""


class Fleet:
    """Every worker's newest life. Each method answers with what must be announced."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.revision = 0
        """Grows with each change that others should hear of at once."""
        self._workers: dict[WorkerId, Worker] = {}
        self._bus_heard = -math.inf

    def registered(self, record: WorkerRecord, now: float) -> list[WorkerLost]:
        """A record was written or renewed."""
        known = self._workers.get(record.worker_id)
        if known is None or record.epoch > known.record.epoch:
            announce = self._happen(known, Event.REPLACED, now) if known else []
            phase = record.phase if record.phase in SAYS else WorkerPhase.STARTING
            self._set(Worker(record=record, phase=phase, since=now, heard=now))
            return announce
        if record.epoch < known.record.epoch:
            return []
        renewed = replace(known, record=record, heard=now, unregistered_since=None)
        self._workers[record.worker_id] = renewed
        if renewed.record != known.record:
            self.revision += 1
        return self._says(renewed, now)

    def unregistered(self, worker_id: WorkerId, now: float) -> list[WorkerLost]:
        """A record was deleted or has expired."""
        known = self._workers.get(worker_id)
        if known is None or known.unregistered_since is not None:
            return []
        known = self._workers[worker_id] = replace(known, unregistered_since=now)
        return self._happen(known, Event.UNREGISTERED, now)

    def heard(self, load: LoadReport, now: float) -> list[WorkerLost]:
        """A load report came."""
        known = self._workers.get(load.worker_id)
        if known is None or load.epoch < known.record.epoch:
            return []
        if load.epoch > known.record.epoch:
            return self._happen(known, Event.REPLACED, now)
        known = self._workers[load.worker_id] = replace(known, load=load, heard=now)
        # Without a record there is no phase to come back to: let the worker register first.
        return [] if known.unregistered_since is not None else self._says(known, now)

    def bus_heard(self, now: float) -> None:
        """The leader's own fleet state came back: what is said on the bus is heard here."""
        self._bus_heard = now

    def tick(self, now: float) -> list[WorkerLost]:
        """Time went by. While this process is deaf (NATS away or stuck, itself suspended) nobody counts as silent."""
        if now - self._bus_heard > self.limits.deaf_s_max:
            self._count_anew(now)
        happened = [(worker, event) for worker in self._workers.values() for event in self._overdue(worker, now)]
        return [lost for worker, event in happened for lost in self._happen(worker, event, now)]

    def described(self, now: float) -> list[FleetWorker]:
        """Everyone, ordered by name."""
        return [self._workers[worker_id].described(now) for worker_id in sorted(self._workers)]

    def losses(self, now: float) -> list[WorkerLost]:
        """All losses that are still remembered: a new leader tells them again, its predecessor may not have."""
        return [
            WorkerLost(worker_id=worker_id, epoch=worker.record.epoch, silent_s=max(0.0, now - worker.heard))
            for worker_id, worker in self._workers.items()
            if worker.phase is WorkerPhase.LOST
        ]

    def _count_anew(self, now: float) -> None:
        for worker_id, worker in self._workers.items():
            if worker.phase not in OVER:
                absent = None if worker.unregistered_since is None else now
                self._workers[worker_id] = replace(worker, heard=now, unregistered_since=absent)

    def _overdue(self, worker: Worker, now: float) -> Iterable[Event]:
        absent = worker.unregistered_since
        if worker.phase in OVER:
            if now - max(worker.since, worker.heard) >= self.limits.remember_s:
                yield Event.FORGETTABLE
        elif absent is not None and now - absent >= self.limits.unregistered_s_max:
            yield Event.STAYS_UNREGISTERED
        elif now - worker.heard >= self.limits.silence_s_max:
            yield Event.SILENT

    def _says(self, worker: Worker, now: float) -> list[WorkerLost]:
        event = SAYS.get(worker.record.phase)
        return self._happen(worker, event, now) if event else []

    def _happen(self, worker: Worker, event: Event, now: float) -> list[WorkerLost]:
        decision = decide(worker, event, now)
        if decision.worker is None:
            del self._workers[worker.record.worker_id]
            self.revision += 1
        elif decision.worker is not worker:
            self._set(decision.worker)
        return list(decision.announce)

    def _set(self, worker: Worker) -> None:
        self._workers[worker.record.worker_id] = worker
        self.revision += 1
