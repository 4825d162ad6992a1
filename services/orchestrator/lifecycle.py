"""A worker's life as a transition table: (phase, event) -> the next phase, and what is announced.

starting -> probing -> ready -> draining -> gone, as the worker's record says; asleep before it starts, if it sleeps;
lost when it falls silent, was replaced or, while it starts, is no longer registered. A lost worker that reports again
returns: it was paused or cut off, and has its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.contracts.load import LoadReport
from shared.contracts.workers import FleetWorker, WorkerLost, WorkerPhase, WorkerRecord


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
            kv_used=load.kv_blocks_used / load.kv_blocks_total if load and load.kv_blocks_total else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker's next state (None: it is forgotten), and the losses to announce."""

    worker: Worker | None
    announce: tuple[WorkerLost, ...] = ()


Handler = Callable[[Worker, float], Decision]


def _enter(phase: WorkerPhase) -> Handler:
    return lambda worker, now: Decision(replace(worker, phase=phase, since=now))


def lose(worker: Worker, now: float) -> Decision:
    """Declare this epoch over to all services that wait for it."""
    lost = WorkerLost(
        worker_id=worker.record.worker_id, epoch=worker.record.epoch, silent_s=max(0.0, now - worker.heard)
    )
    return Decision(replace(worker, phase=WorkerPhase.LOST, since=now), (lost,))


def forget(_worker: Worker, _now: float) -> Decision:
    """Remove the worker from the list."""
    return Decision(None)


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


def decide(worker: Worker, event: Event, now: float) -> Decision:
    """The effect of ``event`` on ``worker``; pairs that the table does not name have none."""
    handler = TRANSITIONS.get((worker.phase, event))
    return handler(worker, now) if handler else Decision(worker)


def diagram(sample: WorkerRecord) -> str:
    """The table as a mermaid state diagram, drawn by making each transition once with ``sample``."""
    arrows: dict[tuple[str, str], list[str]] = {("[*]", WorkerPhase.STARTING.value): ["record seen"]}
    for phase, event in TRANSITIONS:
        after = decide(Worker(record=sample, phase=phase, since=0.0, heard=0.0), event, 0.0).worker
        arrows.setdefault((phase.value, after.phase.value if after else "[*]"), []).append(event.value)
    lines = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    return "\n".join(["stateDiagram-v2", *lines, ""])
