"""Who is asked for more or fewer workers: the launcher on this machine, anybody's HTTP endpoint, or nobody."""

from __future__ import annotations

from typing import Protocol

import httpx
import msgspec

from shared.bus.port import Bus, BusError, NoResponders
from shared.contracts.channels import SCALE
from shared.contracts.planning import FleetScaled, ScaleFleet

REFUSAL_CHARS_MAX = 200
"""Of an endpoint's answer, as much goes into the refusal."""


class Scaler(Protocol):
    """Takes the planner's wishes. What is refused comes back in words, never as an exception."""

    async def scale(self, wish: ScaleFleet) -> FleetScaled:
        """Begin to start or stop workers; answers what it began."""


class LauncherScaler:
    """Asks ``baton up --workers-max``, over the bus."""

    def __init__(self, bus: Bus, answer_s_max: float) -> None:
        self._bus = bus
        self._answer_s_max = answer_s_max

    async def scale(self, wish: ScaleFleet) -> FleetScaled:
        """See ``Scaler``."""
        try:
            return await self._bus.ask(SCALE, wish, timeout_s=self._answer_s_max)
        except NoResponders:
            return FleetScaled(refusal="no launcher takes orders: `baton up --workers-max N` would")
        except BusError as error:
            return FleetScaled(refusal=f"the launcher did not answer: {error or type(error).__name__}")


class WebhookScaler:
    """Posts the wish as JSON. An empty answer means that it is carried out; otherwise it is a ``FleetScaled``."""

    def __init__(self, url: str, answer_s_max: float) -> None:
        self._url = url
        self._answer_s_max = answer_s_max

    async def scale(self, wish: ScaleFleet) -> FleetScaled:
        """See ``Scaler``."""
        try:
            async with httpx.AsyncClient(timeout=self._answer_s_max, trust_env=False) as client:
                answer = await client.post(
                    self._url, content=msgspec.json.encode(wish), headers={"content-type": "application/json"}
                )
            if not answer.is_success:
                words = answer.text[:REFUSAL_CHARS_MAX]
                return FleetScaled(refusal=f"{self._url} answers {answer.status_code}: {words}".rstrip(": "))
            if not answer.content.strip():
                return FleetScaled(change=wish.change)
            return msgspec.json.decode(answer.content, type=FleetScaled)
        except httpx.HTTPError as error:
            return FleetScaled(refusal=f"{self._url} cannot be reached: {error or type(error).__name__}")
        except msgspec.DecodeError as error:
            return FleetScaled(refusal=f"{self._url} answers what is not understood: {error}")


class AdviceScaler:
    """There is nobody to ask: a person reads the plan."""

    async def scale(self, wish: ScaleFleet) -> FleetScaled:
        """See ``Scaler``."""
        return FleetScaled(refusal=f"advice only: {wish.change:+d} {wish.role}")
