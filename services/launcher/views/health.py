"""`baton health`: whether a service says of itself that it is ready; for container health checks."""

from __future__ import annotations

import asyncio

from services.launcher.views.fleet import open_bus
from shared.bus.port import Envelope
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServiceStatus


async def hear_of(nats_url: str, service: str, instance: str, within_s: float) -> ServiceStatus | None:
    """What the service says next, or None if it says nothing in time. Raises BusError."""
    heard: asyncio.Future[ServiceStatus] = asyncio.get_running_loop().create_future()

    def take(status: ServiceStatus, _envelope: Envelope) -> None:
        if not heard.done():
            heard.set_result(status)

    async with open_bus(nats_url) as bus:
        if instance:
            await bus.subscribe(SERVICE_STATUS, take, service=service, instance=instance)
        else:
            await bus.subscribe(SERVICE_STATUS, take, service=service)
        try:
            return await asyncio.wait_for(heard, within_s)
        except TimeoutError:
            return None
