"""Looks after requests from outside: hops that are late, clients that do not read, heads and bodies that do not come.

One walk over all of them a few times a second replaces a timer for each; most requests are over before it comes by.
"""

from __future__ import annotations

import asyncio

from services.router.http.edge import Edge
from services.router.relay.request_context import NEVER, RequestContext
from shared.contracts.failures import Failure, Reason
from shared.runtime.clock import Clock

WALK_S = 0.05
LATE_S_MAX = 5.0
"""For a request to come to its end after its leg was stopped. One that takes longer is stuck on a client that does not
read: its connection is dropped.
"""

TOO_LONG = Failure(reason=Reason.DEADLINE, message="The request took too long.")


class DeadlineMonitor:
    """Walks over ``flights`` and the edge's uploads."""

    def __init__(self, flights: set[RequestContext], edge: Edge, clock: Clock) -> None:
        self._flights = flights
        self._edge = edge
        self._clock = clock

    async def walk(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(WALK_S)
            self.look(self._clock.now())

    def look(self, now: float) -> None:
        """One walk."""
        for flight in list(self._flights):
            if now > flight.deadline_at:
                self._late(flight, now)
        if self._edge.uploads:
            self._edge.end_slow_uploads()
        self._edge.idle.end_late()

    def _late(self, flight: RequestContext, now: float) -> None:
        if flight.late_at == NEVER:
            flight.late_at = now
            flight.stop(TOO_LONG)
        elif now - flight.late_at > LATE_S_MAX:
            flight.exchange.slow = True
            flight.exchange.abort()
