"""`baton up` after its options are read: check that the system can start here, then run it until it is stopped.

How `baton up` starts processes::

    commands/up.py          options of the command line, or one host of a fleet file
      launch.py             keys, free ports, the lock of the state directory
        plan.py             which processes, on which cores or GPUs, with which variables
        session.py          start, print the addresses, wait for Ctrl-C or SIGTERM, stop
          supervisor.py     NATS, then services, then workers; restarts what dies; stops in the reverse order
            children.py     one process: its group, its log file, why it died
              guard.py      ends all processes if the launcher itself is killed
              watchdog.py   finds processes whose event loop stands still
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from services.launcher.bus_client import read_fleet, use_keys
from services.launcher.cluster.folder import CannotCreate, InitRequest
from services.launcher.system import children, machine, state_file
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import plan_system
from services.launcher.system.process_plan import Machine, PlanRefused
from services.launcher.system.screen import Board, Screen
from services.launcher.system.session import Session, endpoints
from services.launcher.system.state_file import RunningModel, RunningSystem
from shared.bus.port import BusDown, BusError
from shared.runtime.clock import SystemClock


async def run_up(options: UpOptions) -> int:
    """Run a whole system, or with ``join`` further workers, until stopped. Returns the exit code."""
    screen = Screen(Board(), SystemClock())
    state_dir = Path(options.state_dir)
    try:
        if options.engine == "vllm" and any(each.workers_most for each in options.models):
            machine.require_vllm()
        if options.join:
            return await join(options, screen, state_dir)
        with state_file.hold(state_dir):
            return await start(options, screen, state_dir)
    except state_file.AlreadyRunning:
        running = state_file.find(state_dir)
        where = f" (pid {running.pid}, {running.endpoint})" if running else ""
        screen.show_error(
            f"A system already runs with the state directory {state_dir}{where}. "
            "`baton up --join` adds a worker to it, `baton down` stops it, --state-dir starts another system."
        )
    except PlanRefused as refused:
        screen.show_error(str(refused))
    return 1


async def start(options: UpOptions, screen: Screen, state_dir: Path) -> int:
    """Run a whole system. Raises PlanRefused before any process starts."""
    options = msgspec.structs.replace(options, models=tuple(map(with_model_folder, options.models)))
    if options.keys_dir:
        create_keys(Path(options.keys_dir), options.nats_host, owns_nats=not options.nats_url)
    if options.routers == 1:
        return await start_on_free_ports(options, screen, state_dir)
    with machine.claimed(options.port):
        above = max(options.port, options.collector_port, options.nats_port if not options.nats_url else 0)
        ports = machine.free_ports(options.host, above, options.routers)
        return await start_on_free_ports(msgspec.structs.replace(options, router_ports=ports), screen, state_dir)


def create_keys(folder: Path, nats_host: str, *, owns_nats: bool) -> None:
    """Create missing keys for a NATS that this launcher starts; another NATS has its own. Raises PlanRefused."""
    from services.launcher.cluster.certificates import NoCertificate  # Imported here: `cryptography` is slow to load.
    from services.launcher.cluster.files import create_for

    try:
        if owns_nats:
            create_for(folder, nats_host, InitRequest(api_key=False), datetime.now(UTC))
    except (CannotCreate, NoCertificate, BusDown, OSError) as error:
        raise PlanRefused(f"The keys in {folder}: {error}") from error
    use_keys(str(folder), over_environment=owns_nats)


async def start_on_free_ports(options: UpOptions, screen: Screen, state_dir: Path) -> int:
    """Run a fully specified system. Raises PlanRefused when a port is in use."""
    here = narrowed(machine.describe_machine(), options)
    plan = plan_system(options, here)
    if taken := machine.taken_ports(plan.ports):
        raise PlanRefused("\n  ".join(taken))
    children.remove(state_dir / "logs")
    where = endpoints(options)
    running = RunningSystem(
        pid=os.getpid(),
        nats_url=plan.nats_url,
        endpoint=where.api,
        engine=options.engine,
        models=[RunningModel(model=each.model, aliases=each.aliases) for each in options.models],
        routers=where.routers,
        keys_dir=options.keys_dir,
    )
    state_file.write(state_dir, running)
    return await Session(plan, options, here, screen, has_ended=lambda: False).run()


async def join(options: UpOptions, screen: Screen, state_dir: Path) -> int:
    """Run further workers for the system of this state directory, or the one on ``nats_url``."""
    running = state_file.find(state_dir)
    if running is None and not options.nats_url:
        raise PlanRefused(
            f"No system runs with the state directory {state_dir}. Start one with `baton up`, "
            "or name its NATS with --nats-url."
        )
    ours = running if running and options.nats_url in {"", running.nats_url} else None
    nats_url = ours.nats_url if ours else options.nats_url
    keys_dir = ours.keys_dir if ours else options.keys_dir
    if keys_dir:
        use_keys(keys_dir)
    models = tuple(named(with_model_folder(each), ours.models if ours else []) for each in options.models)
    options = msgspec.structs.replace(options, nats_url=nats_url, keys_dir=keys_dir, models=models)
    try:
        fleet = await read_fleet(nats_url)
    except BusError as error:
        raise PlanRefused(f"NATS at {nats_url} does not respond: {error}") from error
    here = machine.describe_machine()
    plan = plan_system(options, here, fleet.worker_ids)
    return await Session(
        plan, options, here, screen, has_ended=lambda: ours is not None and not state_file.is_held(state_dir)
    ).run()


async def join_with_token(options: UpOptions) -> int:
    """Run the workers of a host that has joined, until they are stopped or have drained. Returns the exit code."""
    screen = Screen(Board(), SystemClock())
    try:
        if options.engine == "vllm":
            machine.require_vllm()
        with state_file.hold(Path(options.keys_dir)):
            options = msgspec.structs.replace(options, models=tuple(map(with_model_folder, options.models)))
            here = narrowed(machine.describe_machine(), options)
            return await Session(plan_system(options, here), options, here, screen, has_ended=lambda: False).run()
    except state_file.AlreadyRunning:
        screen.show_error(
            f"The workers of {options.host_name} run already with the state directory {options.state_dir}."
        )
    except PlanRefused as refused:
        screen.show_error(str(refused))
    return 1


def narrowed(here: Machine, options: UpOptions) -> Machine:
    """The machine with the cores or GPUs that workers may use: no GPUs if cores are named. Raises PlanRefused if it
    does not have them.
    """
    for kind, wanted, found in (("core", options.cores, here.cores), ("GPU", options.gpus, here.gpus)):
        if missing := [each for each in wanted if each not in found]:
            raise PlanRefused(
                f"This machine has no {kind} {missing[0]}; it has {', '.join(map(str, found)) or 'none'}."
            )
    gpus = () if options.cores else options.gpus or here.gpus
    return msgspec.structs.replace(here, cores=options.cores or here.cores, gpus=gpus)


def named(model: ModelOptions, running: Sequence[RunningModel]) -> ModelOptions:
    """The model of workers that join, with the aliases that it has: if none is named, the one that runs. Raises
    PlanRefused if there are several.
    """
    if model.attach and not (model.model or model.roles):
        return model  # Its server tells the name.
    same = [each for each in running if each.model == model.model or not model.model]
    if not model.model and len(running) > 1:
        names = ", ".join(each.model for each in running)
        raise PlanRefused(f"The running system serves several models: name one with --model ({names}).")
    if not same:
        return model
    return msgspec.structs.replace(model, model=same[0].model, aliases=model.aliases or same[0].aliases)


def with_model_folder(model: ModelOptions) -> ModelOptions:
    """A local path made absolute. Raises PlanRefused when there is no model."""
    return msgspec.structs.replace(model, model=machine.find_model(model.model))
