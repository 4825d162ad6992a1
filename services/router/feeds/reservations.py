"""What routers publish to each other: legs that they have just placed, and requests that may have killed an engine.

Routers publish reservations, so that they do not all choose a worker that looks idle to each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from services.router.state.cluster_view import ClusterView
from services.router.state.quarantine import Life, Quarantine
from services.router.state.reservations import ReservationBook
from services.router.state.worker_view import Sent
from shared.bus.port import Bus, BusDown, Envelope
from shared.contracts.channels import RESERVATIONS
from shared.contracts.ids import RouterId
from shared.contracts.inference import StartLeg
from shared.contracts.routers import ANNOUNCE_S, Reservations
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

BATCH_S: Final = 0.005
"""Pause between two messages with reservations. Placements in the pause travel together."""
QUARANTINED_HEARD_MAX: Final = 64
"""Requests that one message of another router can quarantine here."""
LIVES_HEARD_MAX: Final = 8
"""Workers whose reports end such a quarantine."""


class ReservationFeed:
    """Writes other routers' reservations into ``ClusterView``, and publishes this router's. A single router publishes
    heartbeats only.
    """

    def __init__(
        self, router_id: RouterId, bus: Bus, clock: Clock, cluster: ClusterView, quarantine: Quarantine
    ) -> None:
        self.book = ReservationBook(router_id)
        self._quarantine = quarantine
        self._bus = bus
        self._clock = clock
        self._cluster = cluster
        self._wake = asyncio.Event()

    async def open(self) -> None:
        """Subscribe; the subscriptions are active on return."""
        await self._bus.subscribe(RESERVATIONS, self._on_reservations)

    def leg_started(self, start: StartLeg, context_tokens: int) -> None:
        """A leg was sent to its worker."""
        if not self.book.alone and start.epoch is not None:
            self.book.note(start.worker_id, start.epoch, max(0, start.expected_tokens), context_tokens, start.sequences)
            self._wake.set()

    def quarantined(self, digest: bytes, for_s: float, lives: Sequence[Life]) -> None:
        """Tell the other routers to refuse a request for a while, too, or until one of these workers reports."""
        self.book.note_quarantined(digest, for_s, lives)
        self._wake.set()

    async def follow(self) -> None:
        """Publish until cancelled: after a reservation, at most once per ``BATCH_S``, and once per ``ANNOUNCE_S``."""
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
            self._wake.set()  # The other router does not know this one either.
        now = self._clock.now()
        if message.router_id != self.book.router_id:
            for quarantined in message.quarantined[:QUARANTINED_HEARD_MAX]:
                lives = [(life.worker_id, life.epoch) for life in quarantined.silent[:LIVES_HEARD_MAX]]
                self._quarantine.heard(quarantined.digest, quarantined.for_s, now, lives)
        for one in self.book.hear(message, now):
            sent = Sent(now, one.tokens, one.context_tokens, one.legs)
            self._cluster.others_started(one.worker_id, one.epoch, sent)
