"""Feeds the router's state with reports and KV events of the simulated fleet, delayed and in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from replay.simworker import SimWorker
from services.router.state.fleet import Fleet
from services.router.state.worker_speeds import WorkerSpeeds
from shared.contracts.kv_events import KvEventBatch, KvSnapshot

NETWORK_S = 0.001
"""One-way latency between router and worker."""
KV_EVENTS_S = 0.01
"""From a cache change in an engine to the router's index."""


class Knowledge:
    """Updates one fleet's cluster view and prefix index."""

    def __init__(self, fleet: Fleet, workers: Iterable[SimWorker]) -> None:
        self._fleet = fleet
        self._speeds = WorkerSpeeds(fleet.cluster)
        self._workers: list[SimWorker] = []
        self._batches: deque[tuple[float, KvEventBatch]] = deque()
        for worker in workers:
            self.joined(worker, 0.0)

    def joined(self, worker: SimWorker, now: float) -> None:
        """A worker became ready."""
        self._workers.append(worker)
        self._fleet.cluster.record(worker.record, now)
        self._speeds.joined(worker.record)
        self._fleet.index.join(worker.worker_id, worker.record.epoch)
        nothing = KvSnapshot(worker_id=worker.worker_id, epoch=worker.record.epoch, seq=0, hashes=b"")
        self._fleet.index.restore(nothing)
        self._tell(worker, now)

    def left(self, worker: SimWorker, now: float) -> None:
        """A worker has drained and left."""
        self._workers.remove(worker)
        self._fleet.cluster.unregister(worker.worker_id)
        self._fleet.cluster.lose(worker.worker_id, worker.record.epoch)
        for record in self._fleet.cluster.sweep(now, math.inf):
            self._fleet.index.drop(record.worker_id)
            self._speeds.gone(record.worker_id)

    def changed(self, worker: SimWorker, now: float) -> None:
        """Queue the KV events of an engine's step."""
        batch = worker.kv_events()
        if batch is not None:
            self._batches.append((now + KV_EVENTS_S, batch))

    def catch_up(self, now: float) -> None:
        """Apply everything that has arrived by ``now``."""
        while self._batches and self._batches[0][0] <= now:
            self._fleet.index.apply(self._batches.popleft()[1])
        for worker in self._workers:
            self._tell(worker, now)

    def catch_up_with(self, worker: SimWorker, now: float) -> None:
        """Apply one worker's newest load report."""
        self._tell(worker, now)

    def _tell(self, worker: SimWorker, now: float) -> None:
        report = worker.report(now - NETWORK_S)
        if report is not None:
            load, sent_at = report
            self._fleet.cluster.report(load, sent_at + NETWORK_S)
            self._speeds.load(load)
