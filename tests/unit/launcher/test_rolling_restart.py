"""A rolling restart ends one process at a time, and stops at the first that does not come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, cast

import psutil
import pytest

from services.launcher.system.rolling_restart import RestartStopped, RunningProcess, restart_in_turn, running_processes
from shared.bus.nats_credentials import Access
from shared.contracts.channels import SERVICE_STATUS, Party
from shared.contracts.control import ServicePhase, ServiceStatus
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.system import until

SOON_S = 20.0
SHORT_S = 0.2


class Manager:
    """Ends a worker and starts it: each is told to the test, which publishes what the worker does next."""

    def __init__(self) -> None:
        self.restarted: list[str] = []
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def process(self, worker_id: str) -> RunningProcess:
        access = Access(party=Party.WORKER)
        process = cast("Any", ProcessOf(self, worker_id))
        return RunningProcess(
            name=worker_id, service=Party.WORKER, instance=worker_id, nats_url="", access=access, process=process
        )

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


class ProcessOf:
    """A psutil.Process that ends at once."""

    def __init__(self, manager: Manager, worker_id: str) -> None:
        self._manager, self._worker_id = manager, worker_id

    def terminate(self) -> None:
        self._manager.restart(self._worker_id)

    def wait(self, _s_max: float) -> None:
        """It has ended."""


async def publish(bus: MemoryBus, worker: str, phase: ServicePhase) -> None:
    await bus.publish(SERVICE_STATUS, ServiceStatus(service="worker", instance=worker, phase=phase, detail="broken"))


async def begun(count: int, ready_s_max: float = SOON_S) -> tuple[MemoryBus, Manager, asyncio.Task[None], list[str]]:
    hub = MemoryHub()
    manager, shown = Manager(), list[str]()
    show: Callable[[str], None] = shown.append
    workers = [manager.process(f"w-{number}") for number in range(1, count + 1)]
    task = asyncio.create_task(restart_in_turn(MemoryBus(hub), workers, show, ready_s_max))
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

    with pytest.raises(RestartStopped, match="w-1 failed: broken"):
        await task
    assert len(manager.restarted) == 1


async def test_a_worker_that_is_not_ready_in_time_stops_the_upgrade():
    _bus, manager, task, _shown = await begun(2, ready_s_max=SHORT_S)

    with pytest.raises(RestartStopped, match="w-1 is not ready after 0 s"):
        await task
    assert len(manager.restarted) == 1


def test_processes_are_found_by_state_directory_and_have_the_names_of_baton_up(tmp_path: Path):
    """Each plays a service: its command line and its variables are those of one. Workers fork, as engines do."""
    (tmp_path / "service.env").write_text(
        'PATH="/nowhere"'
    )  # That of `baton service install` says nothing of what runs.
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "router.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "services" / "worker.py").write_text("import os, time\nos.fork()\ntime.sleep(60)\n")
    own = {"PATH": os.environ["PATH"], "BATON_NATS_URL": "nats://x", "BATON_STATE_DIR": str(tmp_path)}
    given = [
        (
            "services.worker",
            {**own, "WORKER_WORKER_ID": "a-1", "BATON_NATS_NKEY_FILE": "/k", "BATON_NATS_CA_FILE": "/c"},
        ),
        ("services.router", own),
        ("services.router", {**own, "ROUTER_INSTANCE": "router-2"}),
        ("services.router", {**own, "ROUTER_INSTANCE": "of-another-system", "BATON_STATE_DIR": "/another"}),
    ]
    played = [
        subprocess.Popen([sys.executable, "-m", module], cwd=tmp_path, env=env, start_new_session=True)
        for module, env in given
    ]
    try:
        until(lambda: len(running_processes(str(tmp_path))) >= 3, "all are found", SOON_S)
        until(lambda: psutil.Process(played[0].pid).children(), "the worker has forked", SOON_S)
        found = running_processes(str(tmp_path))

        assert [(each.name, each.instance) for each in found] == [
            ("router", ""),
            ("router-2", "router-2"),
            ("a-1", "a-1"),
        ]
        assert [each.process.pid for each in found] == [played[number].pid for number in (1, 2, 0)]
        assert found[-1].access == Access(party=Party.WORKER, nkey_file="/k", ca_file="/c")
    finally:
        for each in played:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()
