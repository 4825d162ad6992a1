"""How requests are served that ask for no mode: placement decides, unless an operator has said otherwise."""

from __future__ import annotations

import asyncio
import logging

from services.router.placement.request_fields import Mode, default_mode_of
from shared.bus.port import Bus, BusError
from shared.contracts.channels import DEFAULT_MODE

log = logging.getLogger("baton.router")

RETRY_S = 2.0
"""After the kept value could not be had: until then, placement decides."""


class DefaultModeFeed:
    """Keeps ``mode`` as the operator wants it."""

    def __init__(self, bus: Bus) -> None:
        self.mode = Mode.AUTO
        self._bus = bus

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            try:
                kept = await self._bus.key_value_store(DEFAULT_MODE, ttl_s=None)
                async for entry in kept.watch():
                    if entry is not None:
                        self._told(default_mode_of(entry.value))
            except BusError as error:
                log.debug("what mode is usual is not known: %s", error)
            await asyncio.sleep(RETRY_S)

    def _told(self, mode: Mode) -> None:
        if mode is not self.mode:
            log.info("requests that ask for no mode are served %s", mode.value)
        self.mode = mode
