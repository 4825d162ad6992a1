"""Whether the fleet can be reached: NATS itself, and after an outage each worker behind it.

A worker that was heard before the outage may not have come back yet: a leg sent to it would fail at once. So after a
reconnection those count that have spoken since; when all have, or those that have not are given up, the fleet is here.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable

from services.router.relay.request_context import RequestContext
from services.router.state.cluster_view import ClusterView
from shared.bus.port import Bus
from shared.runtime.clock import Clock

RETURN_S_MAX = 2.0
"""After the router's reconnection, for workers to be heard again; later ones are taken as they come."""
LOOK_S_MIN, LOOK_S_MAX = 0.02, 0.25
"""Between two looks of one request at whether it can go on: longer each time, so that many that wait cost little."""


class BusHealth:
    """One router's view of what it can reach."""

    def __init__(self, bus: Bus, cluster: ClusterView, clock: Clock) -> None:
        self._bus = bus
        self._cluster = cluster
        self._now: Callable[[], float] = clock.now
        self._given_up_at = 0.0
        bus.on_disconnect(self._on_disconnect)
        bus.on_reconnect(self._on_reconnect)

    @property
    def here(self) -> bool:
        """Whether requests can be placed now."""
        return self._bus.connected and (not self._cluster.away or self._now() >= self._given_up_at)

    async def back(self, context: RequestContext, until: float) -> bool:
        """Wait for it, at most ``until``; answers whether it is here. False, too, when the client leaves."""
        looks_s = LOOK_S_MIN
        while not self.here:
            if context.http_request.left or self._now() >= until:
                return False
            await self.pause(context, min(looks_s, until - self._now()))
            looks_s = min(2 * looks_s, LOOK_S_MAX)
        return True

    async def pause(self, context: RequestContext, s: float) -> None:
        """Let so many seconds pass, or less when the client leaves. The request's own time goes on; no hop's does."""
        context.allow(self._now(), context.ends_at)
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        http_request, wake = context.http_request, functools.partial(_wake, left)
        http_request.on_left.append(wake)
        try:
            if not http_request.left:
                await asyncio.wait([left], timeout=s)
        finally:
            http_request.on_left.remove(wake)

    def _on_disconnect(self) -> None:
        self._given_up_at = math.inf  # The connection may be up a moment before anybody is told that it is back.
        self._cluster.disconnected()

    def _on_reconnect(self) -> None:
        self._given_up_at = self._now() + RETURN_S_MAX


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
