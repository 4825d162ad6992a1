"""Placements of one request: the first when its turn has come, and later ones at once."""

from __future__ import annotations

from collections.abc import Callable

from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.parts import Parts
from services.router.relay.request_context import RequestContext
from shared.contracts.failures import Reason
from shared.telemetry.span_names import SpanName

BUS_AWAY = Rejection(
    reason=Reason.BUS_DOWN,
    message="NATS, or the fleet behind it, cannot be reached. Try again shortly.",
    retry_after_s=1.0,
)


class Placing:
    """Asks placement and notes what that took."""

    def __init__(self, parts: Parts) -> None:
        self._now: Callable[[], float] = parts.clock.now
        self._bus_wait_s_max = parts.settings.bus_wait_s_max
        self._fleet = parts.fleet
        self._presence = parts.bus_health
        self._room = parts.room

    async def first(self, flight: RequestContext, ticket: QueueEntry) -> Placement | Rejection:
        """When its turn has come. What nobody could take because the bus was away has its turn when that is back."""
        spent, begun = flight.story.spent, self._now()
        until = min(begun + self._bus_wait_s_max, flight.ends_at)
        while True:
            if not self._presence.here and not await self._presence.back(flight, until):
                return BUS_AWAY
            spent.admission_s, begun = spent.admission_s + self._now() - begun, self._now()
            placement = self._room.offer(ticket)
            begun = self._placed(flight, begun)
            if placement is None:
                placement = await self._room.turn_of(ticket, flight)
                flight.mark(SpanName.ADMISSION, begun, self._now())
            if isinstance(placement, Placement) or self._presence.here or flight.exchange.left:
                spent.admission_s += self._now() - begun
                return placement

    def again(self, flight: RequestContext, need: PlacementRequest) -> Placement | Rejection:
        """Who has had its turn does not stand in line again."""
        begun = self._now()
        placement = self._fleet.place(need, begun)
        self._placed(flight, begun)
        return placement

    def _placed(self, flight: RequestContext, begun: float) -> float:
        """Note what it took; answers when it was over."""
        ended = self._now()
        flight.story.spent.place_s += ended - begun
        flight.mark(SpanName.PLACE, begun, ended)
        return ended
