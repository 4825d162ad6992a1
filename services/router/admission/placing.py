"""Places one request: the first time through the admission queue, and later attempts at once."""

from __future__ import annotations

from collections.abc import Callable

from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.queues import QueueEntry
from services.router.admission.waker import Waker
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.request_context import RequestContext
from services.router.state.bus_health import BusHealth
from services.router.state.fleet import Fleet
from shared.contracts.failures import Reason
from shared.telemetry.span_names import SpanName

BUS_UNREACHABLE = Rejection(
    reason=Reason.BUS_DOWN,
    message="NATS, or the fleet behind it, cannot be reached. Try again shortly.",
    retry_after_s=1.0,
)


def lacks_worker(result: Placement | Rejection) -> bool:
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
        bus_wait_s_max: float,
        waker: Waker,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._bus_health = bus_health
        self._now = now
        self._bus_wait_s_max = bus_wait_s_max
        self._waker = waker

    async def first(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection:
        """Wait in the admission queue. A request that is rejected during a bus outage is offered again after it, one
        whose model sleeps once that is awake.
        """
        timings, begun, is_woken = context.timings, self._now(), False
        until = min(begun + self._bus_wait_s_max, context.ends_at)
        while True:
            if not self._bus_health.reachable and not await self._bus_health.wait_reachable(context, until):
                return BUS_UNREACHABLE
            timings.admission_s, begun = timings.admission_s + self._now() - begun, self._now()
            result = self._queue.offer(entry)
            begun = self._record(context, begun)
            if result is None:
                result = await self._queue.wait(entry, context)
                context.mark(SpanName.ADMISSION, begun, self._now())
            if lacks_worker(result) and self._bus_health.reachable and not is_woken:
                woken = await self._waker.wake(context, entry.request.model)
                if woken is True:
                    is_woken = True
                    continue
                result = woken or result
            if isinstance(result, Placement) or self._bus_health.reachable or context.http_request.left:
                timings.admission_s += self._now() - begun
                return result

    def again(self, context: RequestContext, request: PlacementRequest) -> Placement | Rejection:
        """Place a further attempt, which does not wait in the queue again."""
        begun = self._now()
        result = self._fleet.place(request, begun)
        self._record(context, begun)
        return result

    def _record(self, context: RequestContext, begun: float) -> float:
        """Record the time of a placement; returns its end."""
        ended = self._now()
        context.timings.place_s += ended - begun
        context.mark(SpanName.PLACE, begun, ended)
        return ended
