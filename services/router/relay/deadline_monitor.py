"""Ends what may not go on: late steps of requests, requests of revoked keys, requests that a silent NATS has, clients
that do not read, heads and bodies that do not arrive. Pings clients whose streams have nothing to show for long.

One walk over all requests a few times a second replaces a timer for each; most requests end before the first walk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.router.admission.bus_health import BusHealth
from services.router.request.context import NEVER, RequestContext, early_headers
from services.router.request.errors import EVENT_END
from shared.contracts.failures import Failure, Reason
from shared.runtime.clock import Clock

WALK_S: Final = 0.05
LATE_S_MAX: Final = 5.0
"""Time for a request to end after its legs were stopped. One that takes longer is blocked on a client that does not
read: its connection is dropped.
"""

TOO_LONG: Final = Failure(reason=Reason.DEADLINE, message="The request took too long.")
STOPPING: Final = Failure(
    reason=Reason.ROUTER_STOPPING, message="The router stops before the answer is complete: send the request again."
)
SILENT: Final = Failure(reason=Reason.BUS_DOWN, message="NATS does not respond.")
REVOKED: Final = Failure(reason=Reason.FORBIDDEN, message="The request's API key was revoked.")


class DeadlineMonitor:
    """Walks over the requests in flight and the edge's connections and uploads."""

    def __init__(
        self,
        in_flight: set[RequestContext],
        bus_health: BusHealth,
        end_slow_uploads: Callable[[], None],
        end_late_connections: Callable[[], None],
        clock: Clock,
        ping_s: float,
    ) -> None:
        """``ping_s``: see ``Settings.stream_ping_s``."""
        self._in_flight = in_flight
        self._bus_health = bus_health
        self._end_slow_uploads = end_slow_uploads
        self._end_late_connections = end_late_connections
        self._clock = clock
        self._ping_s = ping_s

    async def run(self) -> None:
        """Walk until cancelled."""
        while True:
            await asyncio.sleep(WALK_S)
            self.walk(self._clock.now())

    def end_all(self) -> None:
        """End all requests in flight, because the router stops: streams with an event that says so."""
        now = self._clock.now()
        for context in list(self._in_flight):
            context.ends_at = context.deadline_at = min(now, context.ends_at)
            self._end(context, now, STOPPING)

    def walk(self, now: float) -> None:
        """End all that is late, and all whose key was revoked."""
        self._bus_health.look(now)
        is_silent = self._bus_health.is_silent
        for context in list(self._in_flight):
            if context.http_request.head.client.is_revoked:
                context.ends_at = context.deadline_at = min(now, context.ends_at)  # No attempt follows.
                self._end(context, now, REVOKED)
            elif now > context.deadline_at:
                self._end(context, now, TOO_LONG)
            elif is_silent and self._has_waited(context, now):
                context.stop(SILENT)
            if now >= context.pings_at:
                self._ping(context, now)
        self._end_slow_uploads()
        self._end_late_connections()

    def _ping(self, context: RequestContext, now: float) -> None:
        """Show the client that its stream goes on, if it has got no event for a while. Never within one."""
        http_request, last_at = context.http_request, context.timings.last_at
        is_quiet = now - last_at >= self._ping_s
        context.pings_at = (now if is_quiet else last_at) + self._ping_s
        is_between = not http_request.begun or context.newest.endswith(EVENT_END)
        if is_quiet and is_between and not (http_request.ended or http_request.left or http_request.is_blocked()):
            http_request.ping(early_headers(context))

    def _has_waited(self, context: RequestContext, now: float) -> bool:
        """Whether a request whose legs NATS has, perhaps, has waited for it as long as others wait to be placed."""
        if context.http_request.begun or context.stopped is not None or not context.legs:
            return False
        return now >= self._bus_health.wait_ends(context.timings.started_at)

    def _end(self, context: RequestContext, now: float, failure: Failure) -> None:
        if context.late_at == NEVER:
            context.late_at = now
            context.stop(failure)
        elif now - context.late_at > LATE_S_MAX:
            context.http_request.slow = True
            context.http_request.abort()
