"""Placements of one request: the first when its turn has come, and later ones at once."""

from __future__ import annotations

from collections.abc import Callable

from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.request_context import RequestContext
from services.router.state.bus_health import BusHealth
from services.router.state.fleet import Fleet
from shared.contracts.failures import Reason
from shared.telemetry.span_names import SpanName

BUS_AWAY = Rejection(
    reason=Reason.BUS_DOWN,
    message="NATS, or the fleet behind it, cannot be reached. Try again shortly.",
    retry_after_s=1.0,
)


class Placing:
    """Asks placement and notes what that took."""

    def __init__(
        self,
        fleet: Fleet,
        queue: AdmissionQueue,
        bus_health: BusHealth,
        now: Callable[[], float],
        *,
        bus_wait_s_max: float,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._bus_health = bus_health
        self._now = now
        self._bus_wait_s_max = bus_wait_s_max

    async def first(self, context: RequestContext, ticket: QueueEntry) -> Placement | Rejection:
        """When its turn has come. What nobody could take because the bus was away has its turn when that is back."""
        timings, begun = context.timings, self._now()
        until = min(begun + self._bus_wait_s_max, context.ends_at)
        while True:
            if not self._bus_health.here and not await self._bus_health.back(context, until):
                return BUS_AWAY
            timings.admission_s, begun = timings.admission_s + self._now() - begun, self._now()
            placement = self._queue.offer(ticket)
            begun = self._placed(context, begun)
            if placement is None:
                placement = await self._queue.turn_of(ticket, context)
                context.mark(SpanName.ADMISSION, begun, self._now())
            if isinstance(placement, Placement) or self._bus_health.here or context.http_request.left:
                timings.admission_s += self._now() - begun
                return placement

    def again(self, context: RequestContext, need: PlacementRequest) -> Placement | Rejection:
        """Who has had its turn does not stand in line again."""
        begun = self._now()
        placement = self._fleet.place(need, begun)
        self._placed(context, begun)
        return placement

    def _placed(self, context: RequestContext, begun: float) -> float:
        """Note what it took; answers when it was over."""
        ended = self._now()
        context.timings.place_s += ended - begun
        context.mark(SpanName.PLACE, begun, ended)
        return ended
