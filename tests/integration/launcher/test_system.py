"""The launcher with real processes and a real nats-server: it starts them, keeps them, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from services.launcher.system import guard, machine
from services.launcher.system.board import Board
from services.launcher.system.children import open_child_starter
from services.launcher.system.plan import ProcessPlan, Stage, SystemPlan, UpOptions, plan_nats
from services.launcher.system.screen import Screen
from services.launcher.system.system import StartFailed, System
from shared.contracts.control import ServicePhase
from shared.runtime.clock import SystemClock

pytestmark = pytest.mark.nats

FAKE = Path(__file__).with_name("fake_service.py")
WAIT_S_MAX = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fake(name: str, nats_url: str, *habits: str, stage: Stage = Stage.WORKERS) -> ProcessPlan:
    command = (sys.executable, str(FAKE), name, *habits)
    return ProcessPlan(name=name, stage=stage, command=command, env={"BATON_NATS_URL": nats_url})


@contextlib.asynccontextmanager
async def system_of(
    folder: Path, hurry: asyncio.Event | None = None, **workers: tuple[str, ...]
) -> AsyncIterator[System]:
    """nats-server, a router that is none, and the given workers with their habits."""
    options = UpOptions(prefill=1, state_dir=str(folder), nats_port=free_port())
    url = f"nats://127.0.0.1:{options.nats_port}"
    processes = (
        plan_nats(options, machine.describe_machine()),
        fake("router", url, stage=Stage.SERVICES),
        *(fake(name, url, *habits) for name, habits in workers.items()),
    )
    screen = Screen(Board(), SystemClock(), Console(file=io.StringIO()))
    environment = {**machine.inherited_environment(), "PYTHONPATH": str(Path(__file__).parents[3])}
    with open_child_starter(folder / "logs", environment) as nursery:
        plan = SystemPlan(processes=processes, ports=(), nats_url=url)
        async with System(plan, nursery, screen, hurry or asyncio.Event()) as system:
            yield system


async def until(promise: Callable[[], bool]) -> None:
    """Look again and again until it holds."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not promise():
            await asyncio.sleep(0.02)


def group_is_gone(group: int) -> bool:
    return not [p for p in psutil.process_iter(["pid"]) if alive_in(group, p.pid)]


def alive_in(group: int, pid: int) -> bool:
    try:
        return os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False


async def test_a_system_that_was_brought_up_and_taken_down_leaves_no_process(tmp_path: Path):
    async with system_of(tmp_path, w1=("has-a-child",), w2=()) as system:
        await system.bring_up()
        rows = list(system.rows.values())
        assert {row.phase for row in rows} == {ServicePhase.READY}

    assert all(group_is_gone(row.pid) for row in rows)
    assert {row.phase for row in rows} == {ServicePhase.STOPPED}


async def test_a_worker_that_dies_is_started_again_under_the_same_name(tmp_path: Path):
    async with system_of(tmp_path, w1=()) as system:
        await system.bring_up()
        first = system.rows["w1"].pid

        os.kill(first, signal.SIGKILL)

        await until(lambda: system.rows["w1"].pid != first and system.rows["w1"].phase is ServicePhase.READY)


async def test_nats_that_dies_is_started_again_and_the_services_come_back(tmp_path: Path):
    async with system_of(tmp_path, w1=()) as system:
        await system.bring_up()
        first = system.rows["nats"].pid

        os.kill(first, signal.SIGKILL)

        await until(lambda: system.rows["nats"].pid != first and system.rows["nats"].phase is ServicePhase.READY)


async def test_a_second_request_to_stop_kills_what_does_not_listen(tmp_path: Path):
    hurry = asyncio.Event()
    async with system_of(tmp_path, hurry, w1=("ignores-sigterm",)) as system:
        await system.bring_up()
        hurry.set()

    assert system.rows["w1"].detail == "killed"


async def test_a_worker_that_cannot_start_ends_the_start_with_its_reason(tmp_path: Path):
    async with system_of(tmp_path, w1=("fails",)) as system:
        with pytest.raises(StartFailed, match=r"w1 did not start. ValueError: the model /nowhere does not exist"):
            await system.bring_up()


async def test_a_worker_that_keeps_dying_is_given_up(tmp_path: Path):
    async with system_of(tmp_path, w1=()) as system:
        await system.bring_up()
        killed = 0

        def is_broken() -> bool:
            nonlocal killed
            pid = system.rows["w1"].pid
            if pid != killed and system.rows["w1"].phase is ServicePhase.READY:
                os.kill(pid, signal.SIGKILL)
                killed = pid
            return system.is_broken

        await until(is_broken)

        assert "w1" in await system.until_broken()


def test_the_guard_ends_what_a_killed_launcher_has_left(tmp_path: Path):
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    launcher = (
        "import subprocess, sys; "
        f"watcher = subprocess.Popen([sys.executable, '-I', '-S', {guard.__file__!r}], stdin=subprocess.PIPE); "
        f"watcher.stdin.write(b'+{sleeper.pid}\\n'); watcher.stdin.flush(); "
        "print(watcher.pid, flush=True); import time; time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout
        killed.stdout.readline()
        killed.kill()

    assert sleeper.wait(WAIT_S_MAX) == -signal.SIGTERM
