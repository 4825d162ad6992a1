"""Orders to a worker, over the bus: leave, take on another role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.launcher.views.fleet import open_bus, read_fleet
from shared.bus.port import AskRefused, AskTimedOut, Bus, Envelope, NoResponders
from shared.contracts.channels import CHANGE_ROLE, DRAIN, DRAINED, LOAD
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, RoleChanged, WorkerDrained
from shared.contracts.load import LoadReport

TAKE_S_MAX = 5.0
"""For a worker to say that it has the order."""
ROLE_S_MAX = 60.0
"""For it to verify another role: longer than all of its attempts."""
SILENCE_S_MAX = 10.0
"""A worker that drains reports its load once a second; after its last word it may still take so long to leave."""


class NotObeyed(Exception):
    """The worker did not do it; the message says why."""


async def drain(nats_url: str, order: DrainWorker, on_legs: Callable[[int], None]) -> WorkerDrained:
    """Until it has left; ``on_legs`` hears how many legs still run. Raises NotObeyed, BusError."""
    async with open_bus(nats_url) as bus:
        left: asyncio.Future[WorkerDrained] = asyncio.get_running_loop().create_future()
        heard = asyncio.Event()

        def on_drained(told: WorkerDrained, _envelope: Envelope) -> None:
            if not left.done():
                left.set_result(told)
            heard.set()

        def on_load(load: LoadReport, _envelope: Envelope) -> None:
            on_legs(load.legs)
            heard.set()

        await bus.subscribe(DRAINED, on_drained, worker_id=order.worker_id)
        await bus.subscribe(LOAD, on_load, worker_id=order.worker_id)
        await _have_drain_taken(bus, nats_url, order)
        while not left.done():
            heard.clear()
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    await heard.wait()
            except TimeoutError:
                words = f"{order.worker_id} fell silent while it drained: see its log"
                raise NotObeyed(words) from None
        return left.result()


async def _have_drain_taken(bus: Bus, nats_url: str, order: DrainWorker) -> None:
    try:
        taken = await bus.ask(DRAIN, order, timeout_s=TAKE_S_MAX)
    except NoResponders:
        raise NotObeyed(await _nobody(nats_url, order.worker_id)) from None
    except (AskTimedOut, AskRefused) as error:
        raise NotObeyed(f"{order.worker_id} does not take the order: {error}") from error
    if taken.refusal:
        raise NotObeyed(f"{order.worker_id} does not take the order: {taken.refusal}")


async def change_role(nats_url: str, order: ChangeRole) -> RoleChanged:
    """When it has happened and was verified. Raises NotObeyed, BusError."""
    async with open_bus(nats_url) as bus:
        try:
            told = await bus.ask(CHANGE_ROLE, order, timeout_s=ROLE_S_MAX)
        except NoResponders:
            raise NotObeyed(await _nobody(nats_url, order.worker_id)) from None
        except (AskTimedOut, AskRefused) as error:
            raise NotObeyed(f"{order.worker_id} does not take the order: {error}") from error
    if told.failure:
        raise NotObeyed(f"{told.worker_id} stays a {told.role.value} worker: {told.failure}")
    return told


async def _nobody(nats_url: str, worker_id: str) -> str:
    known = ", ".join((await read_fleet(nats_url)).worker_ids) or "none"
    return f"No worker of the id {worker_id} listens. Workers that are there: {known}"
