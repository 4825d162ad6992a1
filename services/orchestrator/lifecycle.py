"""The fleet: each worker's life as a transition table, (phase, event) -> the next phase, and what is announced.

starting -> probing -> ready -> draining -> gone, as the worker's record says; asleep before it starts, if it sleeps;
lost when it falls silent, was replaced or, while it starts, is no longer registered. A lost worker that reports again
returns: it was paused or cut off, and has its caches.

``Fleet`` turns records, load reports and the clock into events. Phases come from records only, which arrive in order; a
load report shows that the worker lives and how busy it is. So two sources never contradict each other about a phase.
Messages of older epochs are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.contracts.ids import WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import WITHOUT_ENGINE, FleetWorker, WorkerLost, WorkerPhase, WorkerRecord


class Event(StrEnum):
    """Events of a worker, which ``Fleet`` derives from records, load reports and the clock."""

    SAYS_STARTING = "says starting"
    SAYS_PROBING = "says probing"
    SAYS_READY = "says ready"
    SAYS_DRAINING = "says draining"
    SAYS_ASLEEP = "says asleep"
    SAYS_GONE = "says gone"
    UNREGISTERED = "record removed"
    STAYS_UNREGISTERED = "no record for too long"
    SILENT = "silent for too long"
    REPLACED = "newer epoch seen"
    FORGETTABLE = "over for long"


SAYS: Mapping[WorkerPhase, Event] = {
    WorkerPhase.STARTING: Event.SAYS_STARTING,
    WorkerPhase.PROBING: Event.SAYS_PROBING,
    WorkerPhase.READY: Event.SAYS_READY,
    WorkerPhase.DRAINING: Event.SAYS_DRAINING,
    WorkerPhase.ASLEEP: Event.SAYS_ASLEEP,
    WorkerPhase.GONE: Event.SAYS_GONE,
}
"""A worker cannot report itself lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One epoch of a worker. Times are seconds on the orchestrator's monotonic clock."""

    record: WorkerRecord
    phase: WorkerPhase
    since: float
    heard: float
    unregistered_since: float | None = None
    """When its record disappeared; None while it has one."""
    load: LoadReport | None = None

    def described(self, now: float) -> FleetWorker:
        """The worker as published in the fleet's state."""
        load = self.load
        return FleetWorker(
            record=self.record,
            phase=self.phase,
            since_s=max(0.0, now - self.since),
            silent_s=max(0.0, now - self.heard),
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            kv_used=load.kv_used if load else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """The worker's next state (None: it is forgotten), and the losses to announce."""

    worker: Worker | None
    announce: tuple[WorkerLost, ...] = ()


Handler = Callable[[Worker, float], Transition]


def _enter(phase: WorkerPhase) -> Handler:
    return lambda worker, now: Transition(replace(worker, phase=phase, since=now))


def lose(worker: Worker, now: float) -> Transition:
    """Declare this epoch over to all services that wait for it."""
    lost = WorkerLost(
        worker_id=worker.record.worker_id, epoch=worker.record.epoch, silent_s=max(0.0, now - worker.heard)
    )
    return Transition(replace(worker, phase=WorkerPhase.LOST, since=now), (lost,))


def forget(_worker: Worker, _now: float) -> Transition:
    return Transition(None)


start, probe, be_ready, drain, sleep, leave = (
    _enter(phase)
    for phase in (
        WorkerPhase.STARTING,
        WorkerPhase.PROBING,
        WorkerPhase.READY,
        WorkerPhase.DRAINING,
        WorkerPhase.ASLEEP,
        WorkerPhase.GONE,
    )
)

TRANSITIONS: Mapping[tuple[WorkerPhase, Event], Handler] = {
    (WorkerPhase.STARTING, Event.SAYS_PROBING): probe,
    (WorkerPhase.STARTING, Event.SAYS_READY): be_ready,
    (WorkerPhase.STARTING, Event.SAYS_DRAINING): drain,
    (WorkerPhase.STARTING, Event.SAYS_GONE): leave,
    (WorkerPhase.STARTING, Event.STAYS_UNREGISTERED): lose,
    (WorkerPhase.STARTING, Event.REPLACED): lose,
    # A starting worker may be silent: loading weights keeps it busy. Its record's expiry is its deadline.
    (WorkerPhase.PROBING, Event.SAYS_STARTING): start,
    (WorkerPhase.PROBING, Event.SAYS_READY): be_ready,
    (WorkerPhase.PROBING, Event.SAYS_DRAINING): drain,
    (WorkerPhase.PROBING, Event.SAYS_GONE): leave,
    (WorkerPhase.PROBING, Event.SILENT): lose,
    (WorkerPhase.PROBING, Event.REPLACED): lose,
    (WorkerPhase.READY, Event.SAYS_STARTING): start,
    (WorkerPhase.READY, Event.SAYS_PROBING): probe,
    (WorkerPhase.READY, Event.SAYS_DRAINING): drain,
    (WorkerPhase.READY, Event.SAYS_GONE): leave,
    (WorkerPhase.READY, Event.SILENT): lose,
    (WorkerPhase.READY, Event.REPLACED): lose,
    (WorkerPhase.DRAINING, Event.SAYS_PROBING): probe,
    (WorkerPhase.DRAINING, Event.SAYS_READY): be_ready,
    (WorkerPhase.DRAINING, Event.SAYS_GONE): leave,
    (WorkerPhase.DRAINING, Event.UNREGISTERED): leave,
    (WorkerPhase.DRAINING, Event.SILENT): lose,
    (WorkerPhase.DRAINING, Event.REPLACED): lose,
    # A worker that sleeps has no legs: nothing is lost with it.
    (WorkerPhase.ASLEEP, Event.SAYS_STARTING): start,
    (WorkerPhase.ASLEEP, Event.SAYS_GONE): leave,
    (WorkerPhase.ASLEEP, Event.UNREGISTERED): leave,
    (WorkerPhase.LOST, Event.SAYS_STARTING): start,
    (WorkerPhase.LOST, Event.SAYS_PROBING): probe,
    (WorkerPhase.LOST, Event.SAYS_READY): be_ready,
    (WorkerPhase.LOST, Event.SAYS_DRAINING): drain,
    (WorkerPhase.LOST, Event.SAYS_ASLEEP): sleep,
    (WorkerPhase.LOST, Event.SAYS_GONE): leave,
    (WorkerPhase.LOST, Event.FORGETTABLE): forget,
    (WorkerPhase.GONE, Event.SAYS_STARTING): start,
    (WorkerPhase.GONE, Event.SAYS_PROBING): probe,
    (WorkerPhase.GONE, Event.SAYS_READY): be_ready,
    (WorkerPhase.GONE, Event.SAYS_DRAINING): drain,
    (WorkerPhase.GONE, Event.SAYS_ASLEEP): sleep,
    (WorkerPhase.GONE, Event.FORGETTABLE): forget,
}


def decide(worker: Worker, event: Event, now: float) -> Transition:
    """The effect of ``event`` on ``worker``; pairs that the table does not name have none."""
    handler = TRANSITIONS.get((worker.phase, event))
    return handler(worker, now) if handler else Transition(worker)


def diagram(sample: WorkerRecord) -> str:
    """The table as a mermaid state diagram, drawn by making each transition once with ``sample``."""
    arrows: dict[tuple[str, str], list[str]] = {("[*]", WorkerPhase.STARTING.value): ["record seen"]}
    for phase, event in TRANSITIONS:
        after = decide(Worker(record=sample, phase=phase, since=0.0, heard=0.0), event, 0.0).worker
        arrows.setdefault((phase.value, after.phase.value if after else "[*]"), []).append(event.value)
    lines = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    return "\n".join(["stateDiagram-v2", *lines, ""])


OVER = (WorkerPhase.LOST, WorkerPhase.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Timeouts, in seconds."""

    silence_s_max: float = 3.0
    """A silent ready or draining worker is lost after this time. Workers report at least once a second."""
    unregistered_s_max: float = 10.0
    """A starting worker without a record has this time to write it again, for example after NATS lost its data.
    One that reports is not lost for want of a record: NATS may be unable to store it.
    """
    remember_s: float = 60.0
    """Lost and gone workers are listed for this time."""
    unheard_s_max: float = 1.8
    """Without the leader's fleet state, sent once a second, for so long, silence of workers does not count."""


class Fleet:
    """The newest epoch of every worker. Each method returns the losses to announce."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.revision = 0
        """Grows with each change that must be published at once."""
        self._workers: dict[WorkerId, Worker] = {}
        self._bus_heard = -math.inf

    def registered(self, record: WorkerRecord, now: float) -> list[WorkerLost]:
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
        known = self._workers.get(load.worker_id)
        if known is None or load.epoch < known.record.epoch:
            return []
        if load.epoch > known.record.epoch:
            return self._happen(known, Event.REPLACED, now)
        known = self._workers[load.worker_id] = replace(known, load=load, heard=now)
        # Without a record there is no phase to return to: the worker must register first.
        return [] if known.unregistered_since is not None else self._says(known, now)

    def bus_heard(self, now: float) -> None:
        """The leader's fleet state has arrived: this process receives what is published."""
        self._bus_heard = now

    def tick(self, now: float) -> list[WorkerLost]:
        """Check the timeouts. While this process receives nothing (NATS is down, itself suspended), none counts."""
        if now - self._bus_heard > self.limits.unheard_s_max:
            self._restart_timeouts(now)
        happened = [(worker, event) for worker in self._workers.values() for event in self._overdue(worker, now)]
        return [lost for worker, event in happened for lost in self._happen(worker, event, now)]

    def described(self, now: float) -> list[FleetWorker]:
        """All workers, ordered by name."""
        return [self._workers[worker_id].described(now) for worker_id in sorted(self._workers)]

    def losses(self, now: float) -> list[WorkerLost]:
        """All remembered losses: a new leader publishes them again, its predecessor may not have."""
        return [
            WorkerLost(worker_id=worker_id, epoch=worker.record.epoch, silent_s=max(0.0, now - worker.heard))
            for worker_id, worker in self._workers.items()
            if worker.phase is WorkerPhase.LOST
        ]

    def _restart_timeouts(self, now: float) -> None:
        for worker_id, worker in self._workers.items():
            if worker.phase not in OVER:
                absent = None if worker.unregistered_since is None else now
                self._workers[worker_id] = replace(worker, heard=now, unregistered_since=absent)

    def _overdue(self, worker: Worker, now: float) -> Iterable[Event]:
        absent = worker.unregistered_since
        if worker.phase in OVER:
            if now - max(worker.since, worker.heard) >= self.limits.remember_s:
                yield Event.FORGETTABLE
        elif worker.phase in WITHOUT_ENGINE:  # It reports nothing yet.
            if absent is not None and now - max(absent, worker.heard) >= self.limits.unregistered_s_max:
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
