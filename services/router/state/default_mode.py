"""The mode of requests that ask for none: placement decides, unless the operator has set a default mode."""

from __future__ import annotations

import asyncio
import logging

from services.router.placement.request_fields import Mode, default_mode_of
from shared.bus.port import Bus, BusError
from shared.contracts.channels import DEFAULT_MODE

log = logging.getLogger("baton.router")

RETRY_S = 2.0
"""After the stored value could not be read; until then the last known mode holds."""


class DefaultModeFeed:
    """Keeps ``mode`` equal to the operator's setting."""

    def __init__(self, bus: Bus) -> None:
        self.mode = Mode.AUTO
        self._bus = bus

    async def follow(self) -> None:
        """Watch the setting until cancelled."""
        while True:
            try:
                store = await self._bus.key_value_store(DEFAULT_MODE, ttl_s=None)
                async for entry in store.watch():
                    if entry is not None:
                        self._set(default_mode_of(entry.value))
            except BusError as error:
                log.debug("the default mode cannot be read: %s", error)
            await asyncio.sleep(RETRY_S)

    def _set(self, mode: Mode) -> None:
        if mode is not self.mode:
            log.info("default mode: %s", mode.value)
        self.mode = mode
