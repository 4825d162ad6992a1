"""What a router knows of the simulated fleet, told to its own core the way its shells do: late, and in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from replay.simworker import SimWorker
from services.router.state.fleet import Fleet
from services.router.state.speed_feed import Measures
from shared.contracts.kv_events import KvEventBatch, KvSnapshot

NETWORK_S = 0.001
"""One way between a router and a worker."""
KV_EVENTS_S = 0.01
"""From a change in an engine's cache to the router's index."""
SILENCE_S = 1.0
"""A worker whose load does not change reports so often."""


class Knowledge:
    """Feeds one fleet's view and index."""

    def __init__(self, fleet: Fleet, workers: Iterable[SimWorker]) -> None:
        self._fleet = fleet
        self._measures = Measures(fleet.cluster)
        self._workers: list[SimWorker] = []
        self._batches: deque[tuple[float, KvEventBatch]] = deque()
        for worker in workers:
            self.joined(worker, 0.0)

    def joined(self, worker: SimWorker, now: float) -> None:
        """A worker is ready for the first time."""
        self._workers.append(worker)
        self._fleet.cluster.record(worker.record, now)
        self._measures.joined(worker.record)
        self._fleet.index.join(worker.worker_id, worker.record.epoch)
        nothing = KvSnapshot(worker_id=worker.worker_id, epoch=worker.record.epoch, seq=0, hashes=b"")
        self._fleet.index.restore(nothing)
        self._tell(worker, now)

    def left(self, worker: SimWorker, now: float) -> None:
        """It has drained and is heard no more."""
        self._workers.remove(worker)
        self._fleet.cluster.unregister(worker.worker_id)
        self._fleet.cluster.lose(worker.worker_id, worker.record.epoch)
        for record in self._fleet.cluster.sweep(now, math.inf):
            self._fleet.index.drop(record.worker_id)
            self._measures.gone(record.worker_id)

    def changed(self, worker: SimWorker, now: float) -> None:
        """An engine has made a step: its KV events are on their way."""
        batch = worker.kv_events()
        if batch is not None:
            self._batches.append((now + KV_EVENTS_S, batch))

    def catch_up(self, now: float) -> None:
        """Everything that has arrived by now."""
        while self._batches and self._batches[0][0] <= now:
            self._fleet.index.apply(self._batches.popleft()[1])
        for worker in self._workers:
            self._tell(worker, now)

    def catch_up_with(self, worker: SimWorker, now: float) -> None:
        """One worker's load report, before something else is told about it."""
        self._tell(worker, now)

    def _tell(self, worker: SimWorker, now: float) -> None:
        told = worker.report(now - NETWORK_S)
        if told is not None:
            load, sent_at = told
            self._fleet.cluster.report(load, sent_at + NETWORK_S)
            self._measures.load(load)
