"""Looks after running requests from outside: late hops, clients that left, clients that do not read.

One walk over all flights a few times a second replaces a timer and a task for each of them; most requests are over
before it comes by.
"""

from __future__ import annotations

import asyncio

from services.router.flight import NEVER, Flight
from shared.contracts.failures import Reason
from shared.runtime.clock import Clock

WALK_S = 0.05
WATCHED_AFTER_S = 0.05
"""A request that is older has its client watched: until then, leaving costs the engine next to nothing."""
LATE_S_MAX = 5.0
"""For a request to come to its end after its leg was stopped; one that takes longer is stuck on a client that does not
read, and its connection is closed.
"""


class Watchman:
    """Walks over ``flights``; what it starts are children of ``walk``."""

    def __init__(self, flights: set[Flight], clock: Clock) -> None:
        self._flights = flights
        self._clock = clock

    async def walk(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as watchers:
            while True:
                await asyncio.sleep(WALK_S)
                if self._flights:
                    self.look(self._clock.now(), watchers)

    def look(self, now: float, watchers: asyncio.TaskGroup) -> None:
        """One walk."""
        for flight in list(self._flights):
            if now > flight.deadline_at:
                self._late(flight, now)
            if flight.watcher is None and now - flight.story.started_at > WATCHED_AFTER_S:
                flight.watcher = watchers.create_task(_watch(flight), name=f"watch {flight.exchange.request_id}")

    def _late(self, flight: Flight, now: float) -> None:
        if flight.late_at == NEVER:
            flight.late_at = now
            flight.abort(Reason.DEADLINE, "The request took too long.")
        elif now - flight.late_at > LATE_S_MAX and flight.task is not None:
            flight.story.reason = str(Reason.CLIENT_SLOW)
            flight.task.cancel()


async def _watch(flight: Flight) -> None:
    await flight.exchange.wait_left()
    flight.client_left()
