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

SILENT_S_MAX: Final = 2.5
"""NATS replies to a ping each second. After this time without anything from it, it cannot be reached."""
LOOK_S_MAX: Final = 0.2
"""What one look may add to the silence: this process, too, may have stood still."""
RETURN_S_MAX: Final = 2.0
"""Longest wait for workers to report again after a reconnection; later ones are used once they report."""
CHECK_S_MIN: Final = 0.02
CHECK_S_MAX: Final = 0.25
"""Delay between two checks of one waiting request, doubled each time so that many waiting requests cost little."""


class BusHealth:
    """Whether the router can reach the fleet: NATS itself and, after an outage, each worker.

    An outage begins when the connection is lost, or was silent for ``SILENT_S_MAX``: then it counts from the last sign
    of NATS. A worker that reported before the outage may not have reconnected yet, and a leg sent to it would fail at
    once. After a reconnection the fleet counts as reachable when all workers have reported again, or after
    ``RETURN_S_MAX``. The same holds for a router that starts, which does not know the fleet yet.
    """

    def __init__(self, bus: Bus, cluster: ClusterView, clock: Clock, *, wait_s_max: float) -> None:
        """``wait_s_max``: how long requests wait for NATS and the workers, from their arrival or, if that was before an
        outage, from its beginning.
        """
        self._bus = bus
        self._cluster = cluster
        self._now: Callable[[], float] = clock.now
        self._wait_s_max = wait_s_max
        self._looked_at = self._now()
        self._given_up_at = self._looked_at + RETURN_S_MAX
        self._reads = bus.reads
        self._silent_s = 0.0
        self._down_since = -math.inf
        """Beginning of the last outage."""
        self.is_silent = False
        """Whether NATS sends nothing, though it is connected."""
        bus.on_disconnect(self._on_disconnect)
        bus.on_reconnect(self._on_reconnect)

    @property
    def reachable(self) -> bool:
        """Whether requests can be placed now."""
        if self.is_silent or not self._bus.connected:
            return False
        return self._cluster.is_heard or self._now() >= self._given_up_at

    def wait_ends(self, begun_at: float) -> float:
        """Until when a request waits that arrived, or was placed last, at ``begun_at``."""
        return max(begun_at, self._down_since) + self._wait_s_max

    async def wait_reachable(self, context: RequestContext, until: float) -> bool:
        """Wait at most ``until``; returns whether the fleet is reachable. False, too, when the client leaves, or the
        request's time has ended meanwhile: its key may be revoked.
        """
        check_s = CHECK_S_MIN
        while not self.reachable:
            if context.http_request.left or self._now() >= until:
                return False
            await self.pause(context, min(check_s, until - self._now()))
            check_s = min(2 * check_s, CHECK_S_MAX)
            if self._now() >= context.ends_at:
                return False
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

    def look(self, now: float) -> None:
        """Notice that NATS has fallen silent, or speaks again. Called several times a second."""
        looked_at, self._looked_at = self._looked_at, now
        reads = self._bus.reads
        if reads != self._reads:
            self._reads, self._silent_s = reads, 0.0
            if self.is_silent:
                self._on_reconnect()
        elif self._bus.connected and not self.is_silent:
            self._silent_s += min(now - looked_at, LOOK_S_MAX)
            if self._silent_s > SILENT_S_MAX:
                self._fall(now)
                self.is_silent = True

    def _on_disconnect(self) -> None:
        self._fall(self._now())
        self.is_silent = False

    def _fall(self, now: float) -> None:
        if not self.is_silent:
            self._down_since = now - self._silent_s
        self._silent_s = 0.0
        self._given_up_at = math.inf  # The connection may be up shortly before the bus reports the reconnection.
        self._cluster.disconnected()

    def _on_reconnect(self) -> None:
        self.is_silent = False
        now = self._now()
        self._given_up_at = now + RETURN_S_MAX
        self._cluster.reconnected(now)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
