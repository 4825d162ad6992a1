"""One look over those who wait for a model: who begins now, on which worker."""

from __future__ import annotations

from collections.abc import Callable

from services.router.admission.queues import ANYBODY, ModelQueue, QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId

LOOKS_MAX = 8
"""Requests that are placed anew and found to wait still, in one look: half of them the first in order, half from where
the last look stopped.
"""
LIKE_THE_NEXT = LOOKS_MAX // 2
"""Counted for a request that waits for what the next ones most likely wait for, too."""
BEGUN_MAX = 64
"""Requests that begin in one look."""

Place = Callable[[PlacementRequest, float], Placement | Rejection]
Obstacle = Callable[[QueueEntry, Placement, float], WorkerId | None]


class SchedulingPass:
    """``look`` fills ``decided`` and changes nothing but what those who wait are known to want."""

    def __init__(self, lane: ModelQueue, place: Place, obstacle: Obstacle) -> None:
        self._lane = lane
        self._place = place
        self._obstacle = obstacle
        self._reserved: set[WorkerId] = set()
        """Wanted by somebody who comes before whoever is looked at."""
        self._given: dict[WorkerId, float] = {}
        """Seconds of work that workers got in this look, and that do not show in what is known of them."""
        self._held = 0
        self.decided: list[tuple[QueueEntry, Placement | Rejection]] = []
        self.unfinished = False
        """Another look, right after this one, may find more."""

    def look(self, now: float) -> None:
        """Bounded, however many wait; each is looked at in time."""
        lane, resume = self._lane, self._lane.looked_at
        lane.looked_at = 0
        for position, ticket in enumerate(lane.in_order()):
            if self._held >= LOOKS_MAX // 2 and position < resume:
                continue
            if self._held >= LOOKS_MAX or len(self.decided) >= BEGUN_MAX:
                lane.looked_at = position
                self.unfinished = self.unfinished or len(self.decided) >= BEGUN_MAX
                return
            self._weigh(ticket, self._place(ticket.need, now))

    def _weigh(self, ticket: QueueEntry, placed: Placement | Rejection) -> None:
        if isinstance(placed, Rejection):
            if placed.reason is Reason.WORKER_BUSY:
                self._hold(ticket, ANYBODY, LIKE_THE_NEXT)
            else:
                self.decided.append((ticket, placed))
            return
        prompt, decode = prompt_worker(placed), placed.decode.record.worker_id
        given_s = self._given.get(prompt, 0.0)
        wanted = self._obstacle(ticket, placed, given_s)
        if wanted is not None and given_s:
            self.unfinished = True
            self._hold(ticket, wanted, LIKE_THE_NEXT)
        elif wanted is not None:
            self._hold(ticket, wanted)
        elif prompt in self._reserved or decode in self._reserved:
            self._hold(ticket, prompt if prompt in self._reserved else decode)
        else:
            self._given[prompt] = given_s + ticket.work_s
            self.decided.append((ticket, placed))

    def _hold(self, ticket: QueueEntry, wanted: WorkerId, looks: int = 1) -> None:
        self._held += looks
        self._reserved.add(wanted)
        self._lane.want(ticket, wanted)


def prompt_worker(placed: Placement) -> WorkerId:
    """Who computes the prompt."""
    return (placed.prefill or placed.decode).record.worker_id
