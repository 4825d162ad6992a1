"""Tells whether the router can reach the fleet, and lets requests wait until it can."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from typing import Final

from services.router.placement.placement import Rejection
from services.router.request.context import RequestContext
from services.router.state.cluster_view import ClusterView
from shared.bus.port import Bus
from shared.contracts.failures import Reason
from shared.runtime.clock import Clock

BUS_UNREACHABLE: Final = Rejection(
    reason=Reason.BUS_DOWN, message="NATS, or the fleet, cannot be reached. Try again shortly.", retry_after_s=1.0
)

RETURN_S_MAX: Final = 2.0
"""Longest wait for workers to report again after a reconnection; later ones are used once they report."""
CHECK_S_MIN: Final = 0.02
CHECK_S_MAX: Final = 0.25
"""Delay between two checks of one waiting request, doubled each time so that many waiting requests cost little."""


class BusHealth:
    """Whether the router can reach the fleet: NATS itself and, after an outage, each worker.

    A worker that reported before the outage may not have reconnected yet, and a leg sent to it would fail at once.
    After a reconnection the fleet counts as reachable when all workers have reported again, or after ``RETURN_S_MAX``.
    """

    def __init__(self, bus: Bus, cluster: ClusterView, clock: Clock) -> None:
        self._bus = bus
        self._cluster = cluster
        self._now: Callable[[], float] = clock.now
        self._given_up_at = 0.0
        bus.on_disconnect(self._on_disconnect)
        bus.on_reconnect(self._on_reconnect)

    @property
    def reachable(self) -> bool:
        """Whether requests can be placed now."""
        return self._bus.connected and (not self._cluster.away or self._now() >= self._given_up_at)

    async def wait_reachable(self, context: RequestContext, until: float) -> bool:
        """Wait at most ``until``; returns whether the fleet is reachable. False, too, when the client leaves."""
        check_s = CHECK_S_MIN
        while not self.reachable:
            if context.http_request.left or self._now() >= until:
                return False
            await self.pause(context, min(check_s, until - self._now()))
            check_s = min(2 * check_s, CHECK_S_MAX)
        return True

    async def pause(self, context: RequestContext, s: float) -> None:
        """Sleep, at most until the client leaves. Meanwhile only the request's total deadline applies, not a leg's."""
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
        self._given_up_at = math.inf  # The connection may be up shortly before the bus reports the reconnection.
        self._cluster.disconnected()

    def _on_reconnect(self) -> None:
        self._given_up_at = self._now() + RETURN_S_MAX


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
