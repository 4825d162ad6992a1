"""One scheduling pass over a model's queue: which waiting requests begin now, and on which workers."""

from __future__ import annotations

from collections.abc import Callable

from services.router.admission.queues import ANY_WORKER, ModelQueue, QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId

HELD_MAX = 8
"""A pass ends after so many requests were placed anew and found to wait still. Half of them are the first in order, the
other half follow the position where the last pass stopped, so that every request is tried in time.
"""
HELD_LIKE_NEXT = HELD_MAX // 2
"""Counted for a request that waits for something that the next requests most likely wait for, too."""
BEGUN_MAX = 64
"""Requests that begin in one pass. A placement takes a good tenth of a millisecond, so that more of them would hold up
the streams that the router relays.
"""

Place = Callable[[PlacementRequest, float], Placement | Rejection]
Obstacle = Callable[[QueueEntry, Placement, float], WorkerId | None]


class SchedulingPass:
    """``run`` fills ``decided``. In the queue it changes only which workers the requests wait for."""

    def __init__(self, model_queue: ModelQueue, place: Place, obstacle: Obstacle) -> None:
        self._model_queue = model_queue
        self._place = place
        self._obstacle = obstacle
        self._reserved: set[WorkerId] = set()
        """Workers that an earlier request of the order waits for: later ones must not take them."""
        self._given_s: dict[WorkerId, float] = {}
        """Work that workers got in this pass, which their reports do not show yet. Several small prompts may begin on
        one worker in one pass, as long as their sum keeps within the obstacle's bound: with one prompt for each pass,
        a queue of prompts that take less time than a pass would grow without end.
        """
        self._held = 0
        self.decided: list[tuple[QueueEntry, Placement | Rejection]] = []
        self.unfinished = False
        """Another pass, right after this one, may begin more requests."""

    def run(self, now: float) -> None:
        """The number of placements is bounded, however many requests wait."""
        queue, resume = self._model_queue, self._model_queue.resume_position
        queue.resume_position = 0
        for position, entry in enumerate(queue.in_order()):
            if self._held >= HELD_MAX // 2 and position < resume:
                continue
            if self._held >= HELD_MAX or len(self.decided) >= BEGUN_MAX:
                queue.resume_position = position
                self.unfinished = self.unfinished or len(self.decided) >= BEGUN_MAX
                return
            self._decide(entry, self._place(entry.request, now))

    def _decide(self, entry: QueueEntry, result: Placement | Rejection) -> None:
        if isinstance(result, Rejection):
            if result.reason is Reason.WORKER_BUSY:
                self._hold(entry, ANY_WORKER, HELD_LIKE_NEXT)
            else:
                self.decided.append((entry, result))
            return
        prefill, decode = prefill_worker(result), result.decode.record.worker_id
        given_s = self._given_s.get(prefill, 0.0)
        awaits = self._obstacle(entry, result, given_s)
        if awaits is not None and given_s:
            self.unfinished = True
            self._hold(entry, awaits, HELD_LIKE_NEXT)
        elif awaits is not None:
            self._hold(entry, awaits)
        elif prefill in self._reserved or decode in self._reserved:
            self._hold(entry, prefill if prefill in self._reserved else decode)
        else:
            self._given_s[prefill] = given_s + entry.work_s
            self.decided.append((entry, result))

    def _hold(self, entry: QueueEntry, awaits: WorkerId, count: int = 1) -> None:
        self._held += count
        self._reserved.add(awaits)
        self._model_queue.set_awaited(entry, awaits)


def prefill_worker(placement: Placement) -> WorkerId:
    """The worker that computes the prompt."""
    return (placement.prefill or placement.decode).record.worker_id
