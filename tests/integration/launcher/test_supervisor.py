"""The launcher with real processes and a real nats-server: it starts them, keeps them, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from services.launcher.system import children, guard, machine
from services.launcher.system.children import RestartPolicy, open_child_starter
from services.launcher.system.options import UpOptions
from services.launcher.system.plan import aside, plan_nats
from services.launcher.system.process_plan import ProcessPlan, Stage, SystemPlan
from services.launcher.system.screen import Board, Screen
from services.launcher.system.supervisor import STARTS_AT_ONCE_MIN, StartFailed, Supervisor
from shared.contracts.control import ServicePhase
from shared.runtime.clock import SystemClock
from tests.support.nats_server import free_port

pytestmark = pytest.mark.nats

FAKE = Path(__file__).with_name("fake_service.py")
STILL = Path(__file__).with_name("still_service.py")
STILL_S_MAX = {Stage.SERVICES: 2.0, Stage.WORKERS: 2.0}
LOADS_S = 3.5
"""For which a service holds its loop before it is ready: longer than ``STILL_S_MAX``."""
WAIT_S_MAX = 60.0
QUICK = RestartPolicy(backoff_s_first=0.01, backoff_s_max=0.01)
DEATHS = 5


def fake(name: str, nats_url: str, *habits: str, stage: Stage = Stage.WORKERS) -> ProcessPlan:
    command = (sys.executable, str(FAKE), name, *habits)
    return ProcessPlan(name=name, stage=stage, command=command, env={"BATON_NATS_URL": nats_url})


def still(name: str, nats_url: str, *habits: str) -> ProcessPlan:
    command = (sys.executable, str(STILL), name, *habits)
    return ProcessPlan(name=name, stage=Stage.WORKERS, command=command, env={"BATON_NATS_URL": nats_url})


@contextlib.asynccontextmanager
async def system_of(
    folder: Path, hurry: asyncio.Event | None = None, out: io.StringIO | None = None, **habits: tuple[str, ...]
) -> AsyncIterator[Supervisor]:
    """nats-server, a router and a collector that are none, and the given workers; each with its habits."""
    options = UpOptions(state_dir=str(folder), nats_port=free_port())
    url = f"nats://127.0.0.1:{options.nats_port}"
    processes = (
        plan_nats(options, machine.describe_machine()),
        fake("router", url, *habits.pop("router", ()), stage=Stage.SERVICES),
        aside(fake("collector", url, *habits.pop("collector", ()), stage=Stage.SERVICES)),
        *((still if name.startswith("still") else fake)(name, url, *given) for name, given in habits.items()),
    )
    screen = Screen(Board(), SystemClock(), Console(file=out or io.StringIO()))
    environment = {**machine.inherited_environment(), "PYTHONPATH": str(Path(__file__).parents[3])}
    with open_child_starter(folder / "logs", environment, STILL_S_MAX) as nursery:
        plan = SystemPlan(processes=processes, ports=(), nats_url=url)
        async with Supervisor(plan, nursery, screen, hurry or asyncio.Event(), QUICK) as system:
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


async def test_routers_end_before_the_collector_that_stores_their_last_reports(tmp_path: Path):
    async with system_of(tmp_path) as system:
        await system.bring_up()

    assert instants(tmp_path, "router")["ended"] < instants(tmp_path, "collector")["told"]


def instants(folder: Path, name: str) -> dict[str, int]:
    """When a fake service was told to stop, and when it ended."""
    lines = [line.split() for line in (folder / "logs" / f"{name}.log").read_text().splitlines()]
    return {words[0]: int(words[-1]) for words in lines if words[:1] in (["told"], ["ended"])}


async def test_workers_of_a_group_that_wait_for_one_another_are_started_together(tmp_path: Path):
    """There are more of them than workers may start at a time."""
    count = 2 + max(STARTS_AT_ONCE_MIN, len(os.sched_getaffinity(0)))
    names = [f"rank-{number}" for number in range(count)]
    habits = dict.fromkeys(names, (f"meets:{tmp_path / 'met'}:{count}",))
    async with system_of(tmp_path, **habits) as system:
        grouped = (replace(each, group="g" if each.name in names else "") for each in system.plan.processes)
        system.plan = replace(system.plan, processes=tuple(grouped))

        async with asyncio.timeout(WAIT_S_MAX):
            await system.bring_up()


async def test_a_worker_that_dies_is_started_again_under_the_same_name(tmp_path: Path):
    async with system_of(tmp_path, w1=()) as system:
        await system.bring_up()
        first = system.rows["w1"].pid

        os.kill(first, signal.SIGKILL)

        await until(lambda: system.rows["w1"].pid != first and system.rows["w1"].phase is ServicePhase.READY)


@pytest.mark.parametrize("how", ["stopped", "in a call that does not return"])
async def test_a_process_whose_event_loop_stands_still_is_killed_and_started_again(tmp_path: Path, how: str):
    """One that only loads, with its loop held as long, is let be, and so are the others."""
    shown, hold = io.StringIO(), tmp_path / "hold"
    habits = {"still1": ("0", str(hold)), "still2": (str(LOADS_S), "never"), "w1": ()}
    async with system_of(tmp_path, out=shown, **habits) as system:
        await system.bring_up()
        first = {name: row.pid for name, row in system.rows.items()}
        await until(lambda: all(system.rows[each].detail == "awake" for each in ("still1", "still2")))
        assert "event loop" not in shown.getvalue()

        if how == "stopped":
            os.kill(first["still1"], signal.SIGSTOP)
        else:
            hold.touch()
        await until(lambda: system.rows["still1"].pid != first["still1"] and system.rows["still1"].detail == "awake")

        assert {name for name, row in system.rows.items() if row.pid != first[name]} == {"still1"}
    if how == "stopped":
        assert "still1: It was stopped (SIGSTOP, or a debugger) for 2 s, so it was killed." in shown.getvalue()
    else:
        assert "still1: Its event loop stood still for 2 s, so it was killed." in shown.getvalue()
        assert re.search(r'still_service.py", line \d+ in main', (tmp_path / "logs" / "still1.log").read_text())


async def test_a_worker_whose_logs_were_removed_or_cannot_be_written_is_started_when_it_can(tmp_path: Path):
    """A user removes the state directory of a system that runs; something is in the way when it is made again."""
    logs = tmp_path / "logs"

    def is_again(than: int) -> bool:
        return system.rows["w1"].pid != than and system.rows["w1"].phase is ServicePhase.READY

    async with system_of(tmp_path, w1=(), w2=()) as system:
        await system.bring_up()
        first, other = system.rows["w1"].pid, system.rows["w2"].pid
        shutil.rmtree(logs)
        os.kill(first, signal.SIGKILL)
        await until(lambda: is_again(first))

        shutil.rmtree(logs)
        logs.touch()
        second = system.rows["w1"].pid
        os.kill(second, signal.SIGKILL)
        await until(lambda: "cannot be started" in system.rows["w1"].detail)
        logs.unlink()
        await until(lambda: is_again(second))
        assert system.rows["w2"].pid == other


async def test_a_worker_that_an_upgrade_ends_is_started_again_and_no_failure_is_reported(tmp_path: Path):
    shown = io.StringIO()
    async with system_of(tmp_path, out=shown, w1=()) as system:
        await system.bring_up()
        first = system.rows["w1"].pid

        os.kill(first, signal.SIGTERM)
        await until(lambda: "w1 is ready again" in shown.getvalue())

    assert "w1 was told to end and has ended. Starting it again." in shown.getvalue()
    assert "✗" not in shown.getvalue()
    assert "failed" not in shown.getvalue()


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


async def test_processes_that_keep_dying_are_restarted_for_ever_and_the_system_goes_on(tmp_path: Path):
    async with system_of(tmp_path, w1=()) as system:
        await system.bring_up()
        names = ("router", "collector", "w1")
        pids: dict[str, set[int]] = {name: set() for name in names}

        def have_died_often() -> bool:
            for name, killed in pids.items():
                row = system.rows[name]
                if row.pid not in killed and row.phase is ServicePhase.READY and len(killed) < DEATHS:
                    killed.add(row.pid)
                    os.kill(row.pid, signal.SIGKILL)
            return all(len(killed) == DEATHS for killed in pids.values())

        await until(have_died_often)
        await until(
            lambda: all(
                system.rows[name].pid not in pids[name] and system.rows[name].phase is ServicePhase.READY
                for name in names
            )
        )
        await system.unless_broken(asyncio.sleep(0))


async def test_a_service_that_dies_while_it_starts_is_started_until_it_finds_what_it_needs(tmp_path: Path):
    needed = tmp_path / "needed"
    async with system_of(tmp_path, router=(f"needs:{needed}",), w1=()) as system:
        starting = asyncio.ensure_future(system.bring_up())
        await until(lambda: "is not there yet" in system.rows["router"].detail)
        await until(lambda: system.rows["w1"].phase is ServicePhase.READY)
        assert not starting.done()

        needed.touch()

        await until(starting.done)
        await starting


async def test_workers_that_keep_trying_leave_the_others_in_peace(tmp_path: Path):
    """One finds later what it needs, and one is given up because of its configuration."""
    late, wrong = tmp_path / "late", tmp_path / "wrong"
    wrong.touch()
    out = io.StringIO()
    async with system_of(tmp_path, out=out, w1=(f"needs:{late}",), w2=(f"wrong-if:{wrong}",), w3=()) as system:
        kept = [
            replace(each, keeps_trying=True, is_extra=True) if each.stage is Stage.WORKERS else each
            for each in system.plan.processes
        ]
        system.plan = replace(system.plan, processes=tuple(kept))
        await asyncio.wait_for(system.bring_up(), WAIT_S_MAX)
        assert system.rows["w3"].phase is ServicePhase.READY
        assert "Restarting it" in out.getvalue()
        late.touch()

        await until(lambda: system.rows["w1"].phase is ServicePhase.READY)
        assert [system.rows[each].phase.value for each in ("w1", "w2", "w3")] == ["ready", "failed", "ready"]


async def test_a_wrong_configuration_ends_the_start(tmp_path: Path):
    wrong = tmp_path / "keys.toml"
    wrong.touch()
    async with system_of(tmp_path, collector=(f"wrong-if:{wrong}",), w1=()) as system:
        with pytest.raises(StartFailed, match=r"collector did not start. .*keys.toml is wrong"):
            await system.bring_up()
        assert system.is_misconfigured


async def test_a_configuration_that_became_wrong_ends_a_system_only_if_it_cannot_serve(tmp_path: Path):
    wrong = {name: tmp_path / f"{name}.toml" for name in ("collector", "router")}
    habits = {name: (f"wrong-if:{file}",) for name, file in wrong.items()}
    async with system_of(tmp_path, **habits, w1=()) as system:
        await system.bring_up()
        rows, first = system.rows, system.rows["collector"].pid

        wrong["collector"].touch()
        os.kill(first, signal.SIGKILL)
        await until(lambda: "is wrong" in rows["collector"].detail)
        wrong["collector"].unlink()
        await until(lambda: rows["collector"].pid != first and rows["collector"].phase is ServicePhase.READY)
        await system.unless_broken(asyncio.sleep(0))

        wrong["router"].touch()
        os.kill(rows["router"].pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S_MAX):
            assert "router is not restarted" in await system.until_broken()


async def test_the_log_of_a_process_that_writes_much_is_rotated(tmp_path: Path):
    async with system_of(tmp_path, w1=("chatty",)) as system:
        await system.bring_up()
        current = tmp_path / "logs" / "w1.log"

        await until(lambda: current.with_name("w1.log.1").exists() and current.stat().st_size < children.FILE_BYTES_MAX)

        assert "that was much\n" in children.tail(current)


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
