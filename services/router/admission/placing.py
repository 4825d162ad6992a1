"""Places one request: the first time through the admission queue, and later attempts at once.

Within the operator's bounds the request also waits while NATS or the fleet cannot be reached (``BusHealth``),
and while its model is woken (``Waker``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.bus_health import BUS_UNREACHABLE, CHECK_S_MAX, CHECK_S_MIN, BusHealth
from services.router.admission.prefetches import Prefetches
from services.router.admission.queues import QueueEntry
from services.router.admission.waker import Waker
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.request.context import RequestContext
from shared.contracts.failures import Reason
from shared.telemetry.span_names import SpanName

ADMISSION: Final = SpanName.ADMISSION
PLACE: Final = SpanName.PLACE


def lacks_worker(result: Placement | Rejection | None) -> bool:
    """Whether no worker of the model is ready."""
    return isinstance(result, Rejection) and result.reason is Reason.NO_WORKER


class Placing:
    """Places requests, and records how long that takes."""

    def __init__(
        self,
        fleet: Fleet,
        queue: AdmissionQueue,
        bus_health: BusHealth,
        now: Callable[[], float],
        *,
        waker: Waker,
        prefetches: Prefetches,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._bus_health = bus_health
        self._now = now
        self._waker = waker
        self._prefetches = prefetches

    def first_now(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection | None:
        """The result if it is there at once; None: ``first`` must follow, which waits for it."""
        if not self._bus_health.reachable:
            return None
        result = self._offer(context, entry)
        return None if lacks_worker(result) else result

    async def first(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection:
        """Wait in the admission queue. A request that is rejected during a bus outage is offered again after it, one
        whose model sleeps once that is awake.
        """
        timings, begun, is_woken = context.timings, self._now(), False
        bus_health, arrived_at, check_s = self._bus_health, begun, CHECK_S_MIN
        while True:
            result: Placement | Rejection | None = None
            if not self._queue.has(entry):
                if not bus_health.reachable:
                    until = min(bus_health.wait_ends(arrived_at), context.ends_at)
                    if not await bus_health.wait_reachable(context, until):
                        return BUS_UNREACHABLE
                timings.admission_s += self._now() - begun
                result = self._offer(context, entry)
                begun = self._now()
            if result is None:
                self._prefetches.begin(context, entry.expected)
                result = await self._queue.wait(entry, context)
                context.mark(ADMISSION, begun, self._now())
            if isinstance(result, Placement):
                timings.admission_s += self._now() - begun
                return result
            if lacks_worker(result) and self._fleet.cluster.is_away(entry.request.model):
                until = min(bus_health.wait_ends(arrived_at), context.ends_at)
                if self._now() >= until or context.http_request.left:
                    return BUS_UNREACHABLE
                await bus_health.pause(context, min(check_s, until - self._now()))
                check_s = min(2 * check_s, CHECK_S_MAX)
                continue
            if lacks_worker(result) and bus_health.reachable and not is_woken:
                woken = await self._waker.wake(context, entry.request.model)
                if woken is True:
                    is_woken = True
                    continue
                result = woken or result
            if bus_health.reachable or context.http_request.left:
                timings.admission_s += self._now() - begun
                return result

    def _offer(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection | None:
        """None: the request waits in the admission queue."""
        begun = self._now()
        result = self._queue.offer(entry)
        self._record(context, begun)
        return result

    def again(self, context: RequestContext, request: PlacementRequest) -> Placement | Rejection:
        """Place a further attempt, which does not wait in the queue again."""
        begun = self._now()
        result = self._fleet.place(request, begun)
        self._record(context, begun)
        return result

    def _record(self, context: RequestContext, begun: float) -> None:
        """Record the time of a placement."""
        ended = self._now()
        context.timings.place_s += ended - begun
        context.mark(PLACE, begun, ended)
