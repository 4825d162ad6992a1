"""`baton up`: from nothing to a system that answers, and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
from rich.markup import escape

from services.launcher import machine, state_file
from services.launcher.children import open_nursery
from services.launcher.core.board import Board
from services.launcher.core.plan import Machine, PlanRefused, Stage, SystemPlan, UpOptions, plan_system
from services.launcher.fleet import read_fleet
from services.launcher.screen import Screen
from services.launcher.state_file import RunningSystem
from services.launcher.system import StartFailed, System
from services.launcher.waiting import first_of
from shared.bus.port import BusError
from shared.runtime.clock import SystemClock

ROUTER_READY_S_MAX = 60.0
"""After the workers are ready: the router has heard of them and has checked their tokens."""
POLL_S = 0.2
HTTP_S_MAX = 5.0
MAIN_SYSTEM_POLL_S = 2.0


async def run_up(options: UpOptions) -> int:
    """Start, stay, stop. Answers the exit code."""
    screen = Screen(Board(), SystemClock())
    state_dir = Path(options.state_dir)
    try:
        if options.join:
            return await join(options, screen, state_dir)
        with state_file.hold(state_dir):
            plan = plan_up(options, machine.look())
            for old in (state_dir / "logs").glob("*.log"):
                old.unlink()
            return await run_system(plan, options, screen)
    except state_file.AlreadyRunning:
        running = state_file.find(state_dir)
        where = f" (pid {running.pid}, {running.endpoint})" if running else ""
        screen.complain(
            f"A system already runs with the state directory {state_dir}{where}. "
            "`baton up --join` adds a worker to it, `baton down` ends it, --state-dir starts another one."
        )
    except (PlanRefused, StartFailed, BusError) as failure:
        screen.complain(str(failure))
    return 1


def plan_up(options: UpOptions, here: Machine) -> SystemPlan:
    """The plan, if this machine can carry it out. Raises PlanRefused."""
    options = msgspec.structs.replace(options, model=machine.find_model(options.model))
    if options.engine == "vllm":
        machine.require_vllm()
    plan = plan_system(options, here)
    if taken := machine.taken_ports(plan.ports):
        raise PlanRefused("\n  ".join(taken))
    return plan


async def join(options: UpOptions, screen: Screen, state_dir: Path) -> int:
    """Add workers to the system that runs already."""
    running = state_file.find(state_dir)
    if running is None and not options.nats_url:
        raise PlanRefused(
            f"No system runs with the state directory {state_dir}. Start one with `baton up`, "
            "or name its NATS with --nats-url."
        )
    nats_url = options.nats_url or (running.nats_url if running else "")
    fleet = await read_fleet(nats_url)
    model = machine.find_model(options.model or (running.model if running else ""))
    options = msgspec.structs.replace(options, nats_url=nats_url, model=model)
    if options.engine == "vllm":
        machine.require_vllm()
    plan = plan_system(options, machine.look(), fleet.worker_ids)
    return await run_system(plan, options, screen)


async def run_system(plan: SystemPlan, options: UpOptions, screen: Screen) -> int:
    """Bring the planned processes up, keep them, take them down. Answers the exit code."""
    for note in plan.notes:
        screen.say(f"[yellow]![/] {note}")
    logs = Path(options.state_dir) / "logs"
    with stop_signals() as (stop, hurry), open_nursery(logs, machine.inherited_environment()) as nursery:
        async with System(plan, nursery, screen, hurry) as system:
            broken = await live(system, plan, options, screen, stop)
            screen.say("Stopping: what runs may finish. Ctrl-C again kills it.")
            with screen.watching():
                await system.take_down()
    if broken:
        screen.complain(broken)
    return 1 if broken else 0


async def live(system: System, plan: SystemPlan, options: UpOptions, screen: Screen, stop: asyncio.Event) -> str:
    """From the first process to the moment when all must end; why, if nobody asked for it."""
    try:
        with screen.watching():
            await first_of(system.bring_up(), stop.wait())
        if not stop.is_set():
            await first_of(announce(plan, options, screen), stop.wait())
    except StartFailed as failure:
        return str(failure)
    return await first_of(system.until_broken(), until_told(stop, options)) or ""


async def until_told(stop: asyncio.Event, options: UpOptions) -> None:
    """Until the user asks to stop, or the system that was joined is gone."""
    while not stop.is_set():
        await first_of(stop.wait(), asyncio.sleep(MAIN_SYSTEM_POLL_S))
        if options.join and options.state_dir and state_file.find(Path(options.state_dir)) is None:
            return


async def announce(plan: SystemPlan, options: UpOptions, screen: Screen) -> None:
    """Say where everything is, once the router would answer. Raises StartFailed."""
    logs = Path(options.state_dir) / "logs"
    workers = ", ".join(process.name for process in plan.stage(Stage.WORKERS))
    if options.join:
        screen.say(
            f"\n[green]{workers} joined the system at[/] {plan.nats_url}. Logs: {logs}. Ctrl-C drains and leaves."
        )
        return
    host = "127.0.0.1" if options.host in {"0.0.0.0", "::"} else options.host
    endpoint = f"http://{host}:{options.port}"
    model = await served_model(endpoint)
    running = RunningSystem(
        pid=os.getpid(), nats_url=plan.nats_url, endpoint=endpoint, engine=options.engine, model=options.model
    )
    state_file.write(Path(options.state_dir), running)
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 32, "stream": True})
    screen.say(f"""
[bold green]Baton is ready:[/] {endpoint}/v1   model [bold]{escape(model)}[/]   {workers}

  Try it:   [bold]curl -N {endpoint}/v1/completions -H 'Content-Type: application/json' \\
              -d {escape(shlex.quote(body))}[/]

  Metrics:  http://{host}:{options.collector_port}/metrics   (the router's own: {endpoint}/metrics)
  Logs:     {logs}
  Fleet:    {program()} workers      One more worker: {program()} up --join

Ctrl-C stops it all.""")


def program() -> str:
    """What to type to get this program again."""
    typed = Path(sys.argv[0])
    if typed.name != "baton":
        return "python -m services.launcher"
    return "baton" if shutil.which("baton") else str(typed)


async def served_model(endpoint: str) -> str:
    """The first model that the router offers, once it is ready. Raises StartFailed."""
    said = "it does not answer"
    async with httpx.AsyncClient(base_url=endpoint, timeout=HTTP_S_MAX, trust_env=False) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUTER_READY_S_MAX):
                while True:
                    try:
                        answer = await client.get("/ready")
                        said = answer.text
                        if answer.status_code == httpx.codes.OK:
                            models = (await client.get("/v1/models")).json()
                            return str(models["data"][0]["id"])
                    except (httpx.TransportError, LookupError):
                        pass
                    await asyncio.sleep(POLL_S)
    raise StartFailed(f"All processes are up, but after {ROUTER_READY_S_MAX:.0f} s the router is not ready: {said}")


@contextlib.contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Ctrl-C, SIGTERM or a closed terminal: the first sets ``stop``, the next one ``hurry``."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in numbers:
        loop.add_signal_handler(number, told)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
