"""What the `baton` command asks of a running system over NATS: the fleet, a service's status, orders to workers.

Its credentials come from its settings, or from the running system.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from services.launcher.cluster.folder import NKEY, folder_of, variables
from services.launcher.system.machine import inherited_environment
from shared.bus.nats_bus import connect_nats
from shared.bus.nats_credentials import Access
from shared.bus.port import AskRefused, AskTimedOut, Bus, Envelope, NoResponders
from shared.contracts.channels import (
    CHANGE_ROLE,
    DESCRIBE_ADAPTERS,
    DESCRIBE_FLEET,
    DESCRIBE_WEIGHTS,
    DRAIN,
    DRAINED,
    LOAD,
    ORDER_ADAPTER,
    ORDER_MODEL,
    ORDER_WEIGHTS,
    SERVICE_STATUS,
    WORKER_RECORDS,
    AskChannel,
    Party,
)
from shared.contracts.control import ServiceStatus
from shared.contracts.fleet_orders import (
    AdapterOrdered,
    Adapters,
    AskAdapters,
    AskWeights,
    ChangeRole,
    DrainWorker,
    ModelOrdered,
    OrderAdapter,
    OrderModel,
    OrderWeights,
    RoleChanged,
    Weights,
    WeightsOrdered,
    WorkerDrained,
)
from shared.contracts.load import LoadReport
from shared.contracts.message import Message
from shared.contracts.workers import DescribeFleet, FleetState, FleetWorker, WorkerPhase
from shared.runtime.settings import load_common

M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)
ToWorker = TypeVar("ToWorker", DrainWorker, ChangeRole)

CONNECT_S_MAX = 5.0
ASK_S_MAX = 3.0
ACCEPT_S_MAX = 5.0
"""Longest wait until a worker accepts an order."""
ROLE_S_MAX = 60.0
"""Longest wait until a worker has verified another role: longer than all of its attempts."""
ADAPTER_S_MAX = 600.0
"""Longest wait until all workers have loaded an adapter, of which several do it at the same time."""
WEIGHTS_S_MAX = 3600.0
"""Longest wait until all workers have loaded a checkpoint, or their requests have ended."""
NO_ORCHESTRATOR = "No orchestrator responds: it carries out and logs orders. Start one (`baton up`)."
LOADS_S_MAX = 3.0
"""Longest wait until all workers have reported their load, which they do at least once a second."""
SILENCE_S_MAX = 10.0
"""A draining worker reports its load once a second; after its last report it may take this long to stop."""


@contextlib.asynccontextmanager
async def open_bus(nats_url: str) -> AsyncIterator[Bus]:
    """A short-lived connection of the command line. Raises BusError."""
    bus = await connect_nats(nats_url, name="baton-cli", connect_s_max=CONNECT_S_MAX, access=launcher_access())
    try:
        yield bus
    finally:
        await bus.close()


async def ask_service(nats_url: str, channel: AskChannel[M, A], message: M, *, s_max: float, missing: str) -> A:
    """The reply of a service. Raises CommandFailed with ``missing`` if none replies, BusError if NATS does not."""
    async with open_bus(nats_url) as bus:
        try:
            return await bus.ask(channel, message, timeout_s=s_max)
        except (NoResponders, AskTimedOut) as error:
            raise CommandFailed(missing) from error


@dataclass(frozen=True)
class Fleet:
    """The fleet, as the orchestrator reports it or as the registry has it."""

    state: FleetState
    from_registry: bool

    @property
    def worker_ids(self) -> list[str]:
        """Ids that are in use."""
        gone = {WorkerPhase.GONE, WorkerPhase.LOST}
        return [worker.record.worker_id for worker in self.state.workers if worker.phase not in gone]


async def read_fleet(nats_url: str) -> Fleet:
    """As ``describe_fleet``, with a connection of its own."""
    async with open_bus(nats_url) as bus:
        return await describe_fleet(bus)


async def describe_fleet(bus: Bus) -> Fleet:
    """From the orchestrator, or from the registry when none responds. Raises BusError when NATS does not respond."""
    try:
        return Fleet(await bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=ASK_S_MAX), from_registry=False)
    except (NoResponders, AskTimedOut):
        entries = await (await bus.key_value_store(WORKER_RECORDS)).all()
    workers = [
        FleetWorker(record=entry.value, phase=entry.value.phase, since_s=0.0, silent_s=0.0)
        for entry in entries
        if entry.value is not None
    ]
    return Fleet(FleetState(leader="", term=0, workers=workers), from_registry=True)


async def read_loads(nats_url: str, fleet: Fleet) -> list[LoadReport]:
    """The next load report of each worker of the fleet that sends one in time. Raises BusError."""
    missing = {worker.record.worker_id for worker in fleet.state.workers}
    loads: list[LoadReport] = []
    complete = asyncio.Event()

    def on_load(load: LoadReport, _envelope: Envelope) -> None:
        if load.worker_id in missing:
            missing.remove(load.worker_id)
            loads.append(load)
        if not missing:
            complete.set()

    async with open_bus(nats_url) as bus:
        await bus.subscribe(LOAD, on_load)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), LOADS_S_MAX)
    return loads


async def next_status(nats_url: str, service: str, instance: str, within_s: float) -> ServiceStatus | None:
    """The next status that the service publishes; None if there is none in time. Raises BusError."""
    async with open_bus(nats_url) as bus:
        return await first_status(bus, service, instance, within_s)


async def first_status(
    bus: Bus,
    service: str,
    instance: str,
    within_s: float,
    wanted: Callable[[ServiceStatus], bool] = lambda _status: True,
) -> ServiceStatus | None:
    """The first status of the service, from now on, that is ``wanted``; None if there is none in time. ``instance``:
    empty for any.
    """
    received: asyncio.Future[ServiceStatus] = asyncio.get_running_loop().create_future()

    def on_status(status: ServiceStatus, _envelope: Envelope) -> None:
        if wanted(status) and not received.done():
            received.set_result(status)

    of_instance: dict[str, Any] = {"instance": instance} if instance else {}
    subscription = await bus.subscribe(SERVICE_STATUS, on_status, service=service, **of_instance)
    try:
        return await asyncio.wait_for(received, within_s)
    except TimeoutError:
        return None
    finally:
        await subscription.close()


async def drain(nats_url: str, order: DrainWorker, on_legs: Callable[[int], None]) -> WorkerDrained:
    """Waits until the worker has left; ``on_legs`` gets the number of running legs. Raises CommandFailed, BusError."""
    async with open_bus(nats_url) as bus:
        drained: asyncio.Future[WorkerDrained] = asyncio.get_running_loop().create_future()
        reported = asyncio.Event()

        def on_drained(report: WorkerDrained, _envelope: Envelope) -> None:
            if not drained.done():
                drained.set_result(report)
            reported.set()

        def on_load(load: LoadReport, _envelope: Envelope) -> None:
            on_legs(load.legs)
            reported.set()

        await bus.subscribe(DRAINED, on_drained, worker_id=order.worker_id)
        await bus.subscribe(LOAD, on_load, worker_id=order.worker_id)
        await _send_drain(bus, nats_url, order)
        while not drained.done():
            reported.clear()
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    await reported.wait()
            except TimeoutError:
                raise CommandFailed(f"{order.worker_id} stopped reporting while it drained: see its log") from None
        return drained.result()


async def _send_drain(bus: Bus, nats_url: str, order: DrainWorker) -> None:
    accepted = await _order(bus, nats_url, DRAIN, order, ACCEPT_S_MAX)
    if accepted.refusal:
        raise CommandFailed(f"{order.worker_id} refused the order: {accepted.refusal}")


async def _order(bus: Bus, nats_url: str, channel: AskChannel[ToWorker, A], order: ToWorker, s_max: float) -> A:
    """The reply of the worker. Raises CommandFailed, BusError."""
    try:
        return await bus.ask(channel, order, timeout_s=s_max)
    except NoResponders:
        raise CommandFailed(await _no_such_worker(nats_url, order.worker_id)) from None
    except (AskTimedOut, AskRefused) as error:
        raise CommandFailed(f"{order.worker_id} did not accept the order: {error}") from error


async def change_role(nats_url: str, order: ChangeRole) -> RoleChanged:
    """Returns when the role has changed and was verified. Raises CommandFailed, BusError."""
    async with open_bus(nats_url) as bus:
        changed = await _order(bus, nats_url, CHANGE_ROLE, order, ROLE_S_MAX)
    if changed.failure:
        raise CommandFailed(f"{changed.worker_id} remains a {changed.role.value} worker: {changed.failure}")
    return changed


async def order_adapter(nats_url: str, order: OrderAdapter) -> AdapterOrdered:
    """Returns when the workers have carried it out, or failed to. Raises CommandFailed, BusError."""
    async with open_bus(nats_url) as bus:
        try:
            return await bus.ask(ORDER_ADAPTER, order, timeout_s=ADAPTER_S_MAX)
        except NoResponders as error:
            raise CommandFailed(NO_ORCHESTRATOR) from error
        except (AskTimedOut, AskRefused) as error:
            raise CommandFailed(f"The orchestrator did not carry out the order: {error}. See its log.") from error


@dataclass(frozen=True)
class AdapterView:
    """The fleet, and what the orchestrator says of its adapters."""

    fleet: Fleet
    adapters: Adapters


async def read_adapters(nats_url: str) -> AdapterView:
    """From registry and orchestrator; without an orchestrator only what is loaded. Raises BusError."""
    fleet = await read_fleet(nats_url)
    async with open_bus(nats_url) as bus:
        try:
            return AdapterView(fleet, await bus.ask(DESCRIBE_ADAPTERS, AskAdapters(), timeout_s=ASK_S_MAX))
        except (NoResponders, AskTimedOut):
            return AdapterView(fleet, Adapters())


async def order_weights(nats_url: str, order: OrderWeights) -> WeightsOrdered:
    """Returns when the workers have carried it out, or failed to. Raises CommandFailed, BusError."""
    return await ask_service(nats_url, ORDER_WEIGHTS, order, s_max=WEIGHTS_S_MAX, missing=NO_ORCHESTRATOR)


async def read_weights(nats_url: str) -> Weights:
    """Raises CommandFailed, BusError."""
    return await ask_service(nats_url, DESCRIBE_WEIGHTS, AskWeights(), s_max=ASK_S_MAX, missing=NO_ORCHESTRATOR)


async def order_model(nats_url: str, order: OrderModel) -> ModelOrdered:
    """Returns when the orchestrator has taken the order. Raises CommandFailed, BusError."""
    missing = "No orchestrator responds. Check that one runs: `baton doctor`."
    ordered = await ask_service(nats_url, ORDER_MODEL, order, s_max=ASK_S_MAX, missing=missing)
    if ordered.refusal:
        raise CommandFailed(f"The order was refused: {ordered.refusal}")
    return ordered


async def _no_such_worker(nats_url: str, worker_id: str) -> str:
    fleet = await read_fleet(nats_url)
    for worker in fleet.state.workers:
        if worker.record.worker_id == worker_id:
            return f"{worker_id} is {worker.phase.value} and takes no orders now. Try again in a moment."
    running = ", ".join(fleet.worker_ids) or "none"
    return f"No worker with the id {worker_id} is running. Running workers: {running}"


class CommandFailed(Exception):
    """The running system did not do or answer what was asked; the message says why and what to do."""


def use_keys(folder: str, *, over_environment: bool = False) -> None:
    """Use the launcher's key in that folder of `baton init`, unless the environment names another."""
    own = variables(folder, Party.LAUNCHER)
    if over_environment or not any(os.environ.get(name) for name in own):
        os.environ.update(own)


def keys_for(nats_url: str, folder: str) -> str:
    """The folder, if it has keys and that NATS, which is not ours, uses TLS; else empty."""
    has_keys = (Path(folder) / folder_of(Party.LAUNCHER) / NKEY).is_file()
    return folder if has_keys and urlsplit(nats_url).scheme == "tls" else ""


def launcher_access() -> Access:
    """Raises SettingsError."""
    return load_common(inherited_environment()).nats_access(Party.LAUNCHER)
