"""Where the planner asks for more or fewer workers: the launcher of this machine, a webhook, or nowhere."""

from __future__ import annotations

from typing import Protocol

import httpx
import msgspec

from shared.bus.port import Bus, BusError, NoResponders
from shared.contracts.channels import SCALE
from shared.contracts.planning import FleetScaled, ScaleFleet

REFUSAL_CHARS_MAX = 200
"""Of a webhook's reply in the refusal."""


class Scaler(Protocol):
    """Starts and stops workers. A refusal is returned as text, never raised."""

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        """Begin to start or stop workers; returns what was begun."""


class LauncherScaler:
    """Asks ``baton up --workers-max``, over the bus."""

    def __init__(self, bus: Bus, reply_s_max: float) -> None:
        self._bus = bus
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        """See ``Scaler``."""
        try:
            return await self._bus.ask(SCALE, order, timeout_s=self._reply_s_max)
        except NoResponders:
            return FleetScaled(refusal="no launcher scales: start one with `baton up --workers-max N`")
        except BusError as error:
            return FleetScaled(refusal=f"the launcher did not reply: {error or type(error).__name__}")


class WebhookScaler:
    """Posts the order as JSON. An empty reply means that it is carried out; any other is a ``FleetScaled``."""

    def __init__(self, url: str, reply_s_max: float) -> None:
        self._url = url
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        """See ``Scaler``."""
        try:
            async with httpx.AsyncClient(timeout=self._reply_s_max, trust_env=False) as client:
                reply = await client.post(
                    self._url, content=msgspec.json.encode(order), headers={"content-type": "application/json"}
                )
            if not reply.is_success:
                text = reply.text[:REFUSAL_CHARS_MAX]
                return FleetScaled(refusal=f"{self._url} replies {reply.status_code}: {text}".rstrip(": "))
            if not reply.content.strip():
                return FleetScaled(change=order.change)
            return msgspec.json.decode(reply.content, type=FleetScaled)
        except httpx.HTTPError as error:
            return FleetScaled(refusal=f"{self._url} cannot be reached: {error or type(error).__name__}")
        except msgspec.DecodeError as error:
            return FleetScaled(refusal=f"{self._url} replies with what is no FleetScaled: {error}")


class AdviceScaler:
    """Starts and stops nothing: a person reads the plan."""

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        """See ``Scaler``."""
        return FleetScaled(refusal=f"advice only: {order.change:+d} {order.role}")
