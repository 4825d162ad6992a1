"""A router in virtual time: what it knows of the simulated fleet, and its admission.

Reports and KV events reach it delayed and in order. Placement and admission are the pure code of a real router.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from replay.legs import At, ReplayedRequest
from services.router.admission.admission import Admission
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.queues import QueueEntry
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.state.worker_speeds import WorkerSpeeds
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvEventBatch, KvSnapshot
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerRecord

NETWORK_S = 0.001
"""One-way latency between router and worker."""
KV_EVENTS_S = 0.01
"""Seconds from a cache change in an engine to the router's index."""


class Member(Protocol):
    """What routers know: a worker or a store."""

    record: WorkerRecord
    learns: bool
    due_at: float
    """Time before which no unread report was sent."""

    @property
    def worker_id(self) -> WorkerId: ...

    def report(self, sent_by: float) -> tuple[LoadReport, float] | None:
        """The newest unread load report sent by ``sent_by``, and when it was sent."""

    def kv_events(self) -> KvEventBatch | None:
        """KV events since the last call."""


class Knowledge:
    """Updates one fleet's cluster view and prefix index."""

    def __init__(self, fleet: Fleet, workers: Iterable[Member]) -> None:
        self._fleet = fleet
        self._speeds = WorkerSpeeds(fleet.cluster)
        self._workers: list[Member] = []
        self._learns = True
        self._batches: deque[tuple[float, KvEventBatch]] = deque()
        self._due_at = -math.inf
        """No worker has an unread report from before."""
        for worker in workers:
            self.joined(worker, 0.0)

    def ignore_speeds(self) -> None:
        """Stop learning how fast engines are, in workers and router, because no policy reads it."""
        self._learns = False
        for worker in self._workers:
            worker.learns = False

    def joined(self, worker: Member, now: float) -> None:
        """A worker became ready."""
        self._workers.append(worker)
        self._due_at = -math.inf
        self._fleet.cluster.record(worker.record, now)
        self._speeds.joined(worker.record)
        self._fleet.index.join(worker.worker_id, worker.record.epoch)
        nothing = KvSnapshot(worker_id=worker.worker_id, epoch=worker.record.epoch, seq=0, hashes=b"")
        self._fleet.index.restore(nothing)
        self._tell(worker, now)

    def left(self, worker: Member, now: float) -> None:
        """A worker has drained and left."""
        self._workers.remove(worker)
        self._fleet.cluster.unregister(worker.worker_id)
        self._fleet.cluster.lose(worker.worker_id, worker.record.epoch)
        for record in self._fleet.cluster.sweep(now, math.inf):
            self._fleet.index.drop(record.worker_id)
            self._speeds.gone(record.worker_id)

    def changed(self, worker: Member, now: float) -> None:
        """Queue the KV events of an engine's step."""
        batch = worker.kv_events()
        if batch is not None:
            self._batches.append((now + KV_EVENTS_S, batch))

    def catch_up(self, now: float) -> None:
        """Apply everything that has arrived by ``now``."""
        while self._batches and self._batches[0][0] <= now:
            self._fleet.index.apply(self._batches.popleft()[1])
        sent_by = now - NETWORK_S
        if sent_by >= self._due_at:
            for worker in self._workers:
                if sent_by >= worker.due_at:
                    self._tell(worker, now)
            self._due_at = min([worker.due_at for worker in self._workers], default=math.inf)

    def catch_up_with(self, worker: Member, now: float) -> None:
        """Apply one worker's newest load report."""
        self._tell(worker, now)

    def _tell(self, worker: Member, now: float) -> None:
        if now - NETWORK_S < worker.due_at:
            return
        report = worker.report(now - NETWORK_S)
        if report is not None:
            load, sent_at = report
            self._fleet.report(load, sent_at + NETWORK_S)
            if self._learns:
                self._speeds.load(load)


PASS_S_MIN = 0.02
"""Least time between two scheduling passes: a router limits passes to a share of its time."""


class RouterQueue(Protocol):
    """Requests that wait in a router, in virtual time."""

    @property
    def waiting(self) -> bool:
        """Whether requests wait."""

    def offer(self, replayed: ReplayedRequest, wanted: PlacementRequest, now: float) -> None:
        """Take an arriving request."""

    def schedule_pass(self, now: float) -> None:
        """Something changed."""

    def due(self, now: float) -> bool:
        """Whether this is the pass that was scheduled last."""

    def run_pass(self, now: float) -> None:
        """Decide about waiting requests."""

    def ended(self, replayed: ReplayedRequest) -> None:
        """A placed request has ended."""


class VirtualAdmission:
    """Calls ``decided`` with each placement or rejection, at once or later."""

    def __init__(self, fleet: Fleet, policy: AdmissionPolicy, at: At, decided: Callable[..., None]) -> None:
        self._admission = Admission(policy, fleet.place)
        self._at = at
        self._decided = decided
        self._waiting_requests: dict[QueueEntry, ReplayedRequest] = {}
        self._placed_entries: dict[int, QueueEntry] = {}
        """Entries of placed requests, by request number."""
        self._pass_at = float("inf")

    @property
    def waiting(self) -> bool:
        """Whether requests wait."""
        return bool(self._waiting_requests)

    def offer(self, replayed: ReplayedRequest, wanted: PlacementRequest, now: float) -> None:
        """Offer an arriving request."""
        entry = QueueEntry(wanted, now)
        outcome = self._admission.offer(entry, now)
        if outcome is None:
            self._waiting_requests[entry] = replayed
            self._wake_at(now, self._admission.wakes_at(now))
        else:
            self._settle(now, replayed, entry, outcome)

    def schedule_pass(self, now: float) -> None:
        """Schedule a pass, because something changed."""
        if self._waiting_requests:
            self._wake_at(now, self._admission.pass_at(now))

    def ended(self, replayed: ReplayedRequest) -> None:
        """A placed request has ended."""
        entry = self._placed_entries.pop(replayed.number)
        request = replayed.request
        computed = request.input_tokens - replayed.cached_tokens - replayed.fetched_tokens
        self._admission.ended(entry, max(0, computed), request.output_tokens)

    def run_pass(self, now: float) -> None:
        """Run a scheduling pass. All reports that have arrived by ``now`` must have been applied."""
        for entry, outcome in self._admission.schedule(now):
            self._settle(now, self._waiting_requests.pop(entry), entry, outcome)
        if self._waiting_requests:
            self._wake_at(now, self._admission.wakes_at(now))

    def due(self, now: float) -> bool:
        """Whether this is the pass that was scheduled last."""
        if self._pass_at != now:
            return False
        self._pass_at = float("inf")
        return True

    def _settle(self, now: float, replayed: ReplayedRequest, entry: QueueEntry, outcome: Placement | Rejection) -> None:
        if isinstance(outcome, Placement):
            self._placed_entries[replayed.number] = entry
        self._decided(now, replayed, outcome)

    def _wake_at(self, now: float, at: float | None) -> None:
        if at is not None and max(at, now + PASS_S_MIN) < self._pass_at:
            self._pass_at = max(at, now + PASS_S_MIN)
            self._at(self._pass_at)
