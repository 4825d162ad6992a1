"""Follows the operator's default mode, which applies to requests that name none."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from services.router.request.facts import Mode
from services.router.request.mode import default_mode_of
from shared.bus.port import Bus, BusError
from shared.contracts.channels import DEFAULT_MODE

log = logging.getLogger("baton.router")

RETRY_S: Final = 2.0
"""Pause after the default mode could not be read; the last known mode applies until then."""


class DefaultModeFeed:
    """Keeps ``mode`` equal to the operator's setting."""

    def __init__(self, bus: Bus) -> None:
        self.mode = Mode.AUTO
        self._bus = bus

    async def follow(self) -> None:
        """Watch the setting until cancelled."""
        while True:
            try:
                store = await self._bus.key_value_store(DEFAULT_MODE)
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
