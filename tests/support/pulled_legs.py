"""Legs whose frames are awaited, for tests and benchmarks: the router is called back instead."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shared.bus.leg_inbox import Leg, LegInbox, LegReader
from shared.contracts.inference import Frame, StartLeg


class PulledLeg(LegReader):
    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.leg: Leg

    @classmethod
    async def start(cls, inbox: LegInbox, start: StartLeg, headers: Mapping[str, str] | None = None) -> PulledLeg:
        """Ask a worker to serve a leg. Raises BusDown, MessageTooLarge."""
        pulled = cls()
        pulled.leg = await inbox.start(start, pulled, headers)
        return pulled

    def leg_changed(self, leg: Leg) -> None:
        self._changed.set()

    def leg_crashed(self, bug: Exception) -> None:
        raise bug

    @property
    def leg_id(self) -> str:
        return self.leg.leg_id

    @property
    def worker_id(self) -> str:
        return self.leg.worker_id

    @property
    def ended(self) -> bool:
        return self.leg.ended

    def cancel(self) -> None:
        self.leg.cancel()

    async def frames(self) -> list[Frame]:
        """All frames since the last call, at least one. Raises LegFailed once those before the failure were read."""
        while not self.leg.unread:
            if self.leg.has_failed or self.leg.ended:
                raise self.leg.failure()
            self._changed.clear()
            await self._changed.wait()
        return self.leg.frames()
