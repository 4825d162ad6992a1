"""An upgrade restarts one worker at a time, and stops at the first that does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event

import pytest

from services.launcher.service_files.upgrade import Systemctl, UpgradeStopped, restart_workers
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus
from tests.support.memory_bus import MemoryBus, MemoryHub

SOON_S = 20.0
SHORT_S = 0.2


class Manager:
    """Ends a worker and starts it: each is told to the test, which publishes what the worker does next."""

    def __init__(self) -> None:
        self.restarted: list[str] = []
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def restart(self, worker_id: str) -> None:
        said = Event()
        self._loop.call_soon_threadsafe(self._told, worker_id, said)
        assert said.wait(SOON_S)

    def _told(self, worker_id: str, said: Event) -> None:
        self.restarted.append(worker_id)
        self.changed.set()
        said.set()

    async def next(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.restarted) < count:
                self.changed.clear()
                await self.changed.wait()


async def publish(bus: MemoryBus, worker: str, phase: ServicePhase) -> None:
    await bus.publish(SERVICE_STATUS, ServiceStatus(service="worker", instance=worker, phase=phase, detail="broken"))


async def begun(count: int, ready_s_max: float = SOON_S) -> tuple[MemoryBus, Manager, asyncio.Task[None], list[str]]:
    hub = MemoryHub()
    manager, shown = Manager(), list[str]()
    show: Callable[[str], None] = shown.append
    workers = [f"w-{number}" for number in range(1, count + 1)]
    task = asyncio.create_task(restart_workers(MemoryBus(hub), workers, manager.restart, show, ready_s_max))
    return MemoryBus(hub), manager, task, shown


async def until_done(task: asyncio.Task[None], bus: MemoryBus, worker: str, phase: ServicePhase) -> None:
    """Publish as a service does, again and again."""
    async with asyncio.timeout(SOON_S):
        while not task.done():
            await publish(bus, worker, phase)
            await asyncio.sleep(0)


async def test_the_second_worker_restarts_when_the_first_is_ready_again():
    bus, manager, task, shown = await begun(2)
    await manager.next(1)
    assert manager.restarted == ["w-1"]

    async with asyncio.timeout(SOON_S):
        while len(manager.restarted) < 2:
            await publish(bus, "w-1", ServicePhase.READY)
            await asyncio.sleep(0)
    await until_done(task, bus, "w-2", ServicePhase.READY)

    await task
    assert manager.restarted == ["w-1", "w-2"]
    assert shown[-1] == "w-2 is ready."


async def test_a_worker_that_fails_stops_the_upgrade():
    bus, manager, task, _shown = await begun(2)
    await manager.next(1)

    await until_done(task, bus, "w-1", ServicePhase.FAILED)

    with pytest.raises(UpgradeStopped, match="w-1 failed: broken"):
        await task
    assert len(manager.restarted) == 1


async def test_a_worker_that_is_not_ready_in_time_stops_the_upgrade():
    _bus, manager, task, _shown = await begun(2, ready_s_max=SHORT_S)

    with pytest.raises(UpgradeStopped, match="w-1 is not ready after 0 s"):
        await task
    assert len(manager.restarted) == 1


def test_a_missing_systemctl_stops_the_upgrade():
    with pytest.raises(UpgradeStopped, match=r"restart baton-worker@x\.service"):
        Systemctl(user=True, program="/nowhere/systemctl").restart("x")
