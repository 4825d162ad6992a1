"""Routers publish what they place, so that they do not all choose a worker that looks idle to each of them."""

from __future__ import annotations

import asyncio
import logging

from services.router.state.cluster_view import ClusterView
from services.router.state.reservations import ReservationBook
from services.router.state.sent_work import Sent
from shared.bus.port import Bus, BusDown, Envelope
from shared.contracts.channels import RESERVATIONS
from shared.contracts.ids import RouterId
from shared.contracts.inference import StartLeg
from shared.contracts.reservations import ANNOUNCE_S, Reservations
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

BATCH_S = 0.005
"""Between two messages with reservations: placements in between travel together."""


class ReservationFeed:
    """Writes other routers' reservations into ``ClusterView``, and publishes this router's. A single router publishes
    heartbeats only.
    """

    def __init__(self, router_id: RouterId, bus: Bus, clock: Clock, cluster: ClusterView) -> None:
        self.book = ReservationBook(router_id)
        self._bus = bus
        self._clock = clock
        self._cluster = cluster
        self._wake = asyncio.Event()

    async def open(self) -> None:
        """Listen; live when it returns."""
        await self._bus.subscribe(RESERVATIONS, self._on_reservations)

    def leg_started(self, start: StartLeg, context_tokens: int) -> None:
        """A leg was sent to its worker."""
        if not self.book.alone and start.epoch is not None:
            self.book.note(start.worker_id, start.epoch, max(0, start.expected_tokens), context_tokens)
            self._wake.set()

    async def follow(self) -> None:
        """Publish until cancelled: at once after a pause, and at most once each ``BATCH_S``."""
        while True:
            self._wake.clear()
            self.book.forget_silent(self._clock.now())
            await self._publish()
            await asyncio.sleep(BATCH_S)
            try:
                async with asyncio.timeout(ANNOUNCE_S - BATCH_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _publish(self) -> None:
        """Reservations that cannot be sent are dropped: they would be out of date after the outage."""
        try:
            await self._bus.publish(RESERVATIONS, self.book.message())
        except BusDown:
            log.debug("reservations were not sent: NATS is down")

    def _on_reservations(self, message: Reservations, _envelope: Envelope) -> None:
        if not self.book.knows(message.router_id):
            self._wake.set()  # it does not know this router either
        now = self._clock.now()
        for one in self.book.hear(message, now):
            sent = Sent(now, one.tokens, one.context_tokens, one.legs)
            self._cluster.others_started(one.worker_id, one.epoch, sent)
