"""Which processes make up a system on this machine, and which settings each of them gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal

import msgspec

from services.launcher.cluster.folder import SECURE, variables
from services.launcher.system.devices import Device, share_cores, share_gpus
from shared.contracts.channels import Party
from shared.contracts.workers import Role


class PlanRefused(Exception):
    """What was asked for cannot be started; the message says what to do instead."""


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton up` was asked for."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    store: int = 0
    """Workers that keep copies of KV blocks and compute nothing."""
    model: str = ""
    """Empty: the worker's default."""
    engine: Literal["vllm", "simulated"] = "vllm"
    connector: Literal["baton", "upstream", ""] = ""
    """What moves KV between vLLM engines; empty: the worker's default."""
    host: str = "127.0.0.1"
    port: int = 8000
    routers: int = 1
    """More than one share ``port``."""
    router_ports: tuple[int, ...] = ()
    """One of its own for each router, if there are several."""
    collector_port: int = 8001
    nats_port: int = 4222
    nats_url: str = ""
    """A NATS that runs already; empty: one is started."""
    keys_dir: str = ""
    """A folder of `baton init`: each process gets its own key, and NATS is spoken to over TLS. Empty: neither."""
    state_dir: str
    kv_cache_bytes: int = 0
    engine_args: str = ""
    insecure: bool = False
    """Whoever reaches ``host`` may ask, although there are no API keys."""
    entrance_decided: bool = False
    """The environment tells the routers who may ask."""
    join: bool = False
    workers_min: int = 1
    workers_max: int = 0
    """Above 0: the planner may start and drain workers up to so many; 0: what was started stays."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine has to offer."""

    python: str
    nats_server: str
    """Path of the binary; empty when there is none."""
    cores: tuple[int, ...]
    """One logical CPU per physical core that this process may use."""
    gpus: tuple[str, ...] = ()
    """GPU indexes; empty when the installed engine is the CPU one."""


STORES = f"{Role.STORE.value}-"
"""With which their names begin: they take no part of what engines compute on."""
STORE = Device(words="no engine")
LOCAL_HOSTS = ("localhost", "::1")
LOCAL_PREFIX = "127."


class Stage(IntEnum):
    """Processes start in this order and stop in the reverse one."""

    NATS = 0
    SERVICES = 1
    WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process to start."""

    name: str
    """Unique in this system; for a worker, its worker id."""
    stage: Stage
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """Where it runs, for a person: "core 0"."""
    is_extra: bool = False
    """The system runs on if it cannot be started."""


@dataclass(frozen=True, kw_only=True)
class PortNeed:
    """A port that must be free before anything starts."""

    host: str
    port: int
    option: str
    purpose: str


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """Everything `baton up` starts."""

    processes: tuple[ProcessPlan, ...]
    ports: tuple[PortNeed, ...]
    nats_url: str
    notes: tuple[str, ...] = ()
    """What the user should know before it starts."""

    def stage(self, stage: Stage) -> list[ProcessPlan]:
        """The processes of one stage, in order."""
        return [process for process in self.processes if process.stage is stage]


def plan_system(options: UpOptions, machine: Machine, names_taken: Sequence[str] = ()) -> SystemPlan:
    """A whole system, or with ``join`` only its further workers. Raises PlanRefused."""
    nats_url = options.nats_url or f"{'tls' if options.keys_dir else 'nats'}://127.0.0.1:{options.nats_port}"
    base = {party: surroundings(options, nats_url, party) for party in Party}
    workers, notes = plan_workers(options, machine, base[Party.WORKER], names_taken)
    if options.join and (options.routers > 1 or options.workers_max):
        given = "--routers" if options.routers > 1 else "--workers-max"
        raise PlanRefused(f"{given} is for a new system: --join adds workers only.")
    if options.join:
        return SystemPlan(processes=tuple(workers), ports=(), nats_url=nats_url, notes=tuple(notes))
    check_entrance(options)
    ports = [
        PortNeed(host=options.host, port=options.port, option="--port", purpose="the OpenAI API"),
        PortNeed(host=options.host, port=options.collector_port, option="--collector-port", purpose="metrics"),
    ]
    services = [
        plan_orchestrator(options, machine, base[Party.ORCHESTRATOR]),
        service(machine, "collector", base[Party.COLLECTOR], host=options.host, port=options.collector_port),
        *plan_routers(options, machine, base[Party.ROUTER]),
    ]
    if options.nats_url:
        return SystemPlan(processes=(*services, *workers), ports=tuple(ports), nats_url=nats_url, notes=tuple(notes))
    ports.append(PortNeed(host="127.0.0.1", port=options.nats_port, option="--nats-port", purpose="NATS"))
    nats = plan_nats(options, machine)
    return SystemPlan(processes=(nats, *services, *workers), ports=tuple(ports), nats_url=nats_url, notes=tuple(notes))


def check_entrance(options: UpOptions) -> None:
    """Strangers need keys. Raises PlanRefused."""
    local = options.host in LOCAL_HOSTS or options.host.startswith(LOCAL_PREFIX)
    if not (local or options.insecure or options.entrance_decided):
        raise PlanRefused(
            f"With --host {options.host} other machines could ask for anything, for there are no API keys. Make one: "
            "`baton keys new --tenant NAME --file keys.toml`, and start with ROUTER_KEYS_FILE=keys.toml; or say "
            "--insecure if only friends can reach this machine."
        )


def surroundings(options: UpOptions, nats_url: str, party: Party) -> dict[str, str]:
    """What every process of that party is told."""
    base = {"BATON_NATS_URL": nats_url, "BATON_STATE_DIR": options.state_dir}
    return {**base, **variables(options.keys_dir, party)} if options.keys_dir else base


def plan_nats(options: UpOptions, machine: Machine) -> ProcessPlan:
    """nats-server with JetStream on, for this machine only."""
    if not machine.nats_server:
        raise PlanRefused(
            "No nats-server was found. It comes with `make setup`; or name a binary in BATON_NATS_SERVER, "
            "or a running NATS with --nats-url."
        )
    store = f"{options.state_dir}/nats"
    flags = ("--addr", "127.0.0.1", "--port", str(options.nats_port), "--jetstream", "--store_dir", store)
    secured = ("--config", f"{options.keys_dir}/{SECURE}") if options.keys_dir else ()
    return ProcessPlan(name="nats", stage=Stage.NATS, command=(machine.nats_server, *flags, *secured))


def service(machine: Machine, name: str, base: Mapping[str, str], *, host: str = "", port: int = 0) -> ProcessPlan:
    """One of our light services; ``host`` and ``port`` for those that listen for HTTP."""
    prefix = name.upper()
    listens = {f"{prefix}_HOST": host, f"{prefix}_PORT": str(port)} if port else {}
    command = (machine.python, "-m", f"services.{name}")
    return ProcessPlan(name=name, stage=Stage.SERVICES, command=command, env={**base, **listens})


def plan_orchestrator(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> ProcessPlan:
    """It plans for as many workers as it may have, if it may have others than those it begins with."""
    limits = {
        "ORCHESTRATOR_PLANNER": "act",
        "ORCHESTRATOR_PLANNER_WORKERS_MIN": str(options.workers_min),
        "ORCHESTRATOR_PLANNER_WORKERS_MAX": str(options.workers_max),
    }
    return service(machine, "orchestrator", {**base, **limits} if options.workers_max else base)


def plan_routers(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> list[ProcessPlan]:
    """One router on the port, or several that share it and have each a port of its own, to be asked by itself."""
    base = {**base, "ROUTER_INSECURE": "true"} if options.insecure else base
    if options.routers == 1:
        return [service(machine, "router", base, host=options.host, port=options.port)]
    routers = []
    for number, port in enumerate(options.router_ports, 1):
        name = f"router-{number}"
        alone = service(machine, "router", base, host=options.host, port=port)
        env = {**alone.env, "ROUTER_SHARED_PORT": str(options.port), "ROUTER_INSTANCE": name}
        routers.append(replace(alone, name=name, env=env))
    return routers


def plan_workers(
    options: UpOptions, machine: Machine, base: Mapping[str, str], names_taken: Sequence[str]
) -> tuple[list[ProcessPlan], list[str]]:
    """The workers, each with a part of the machine of its own where there is enough of it."""
    roles = [Role.PREFILL] * options.prefill + [Role.DECODE] * options.decode + [Role.BOTH] * options.both
    if not roles and not (options.join and options.store):
        raise PlanRefused("No workers: ask for at least one with --prefill, --decode or --both.")
    if options.store and options.connector == "upstream":
        raise PlanRefused("--store keeps what the KV exchange moves: leave --connector upstream out.")
    if roles and not options.join and not options.both and not (options.prefill and options.decode):
        missing, given = ("decode", "--prefill") if options.prefill else ("prefill", "--decode")
        raise PlanRefused(f"Only {given} workers: nobody would {missing}. Add --{missing} 1 or --both 1.")
    if options.workers_max and not options.workers_min <= len(roles) <= options.workers_max:
        raise PlanRefused(
            f"{len(roles)} workers are not between --workers-min {options.workers_min} and "
            f"--workers-max {options.workers_max}."
        )
    names = list(fresh_names([*roles, *[Role.STORE] * options.store], names_taken))
    # Those that may come later get their parts of the machine now, for the first ones would have all of it.
    count, running = max(len(roles), options.workers_max), sum(not name.startswith(STORES) for name in names_taken)
    devices, notes = devices_for(options, machine, count, running) if count else ([], [])
    settings = worker_settings(options, base)
    engines = [
        plan_worker(machine, settings, role, name, device)
        for role, name, device in zip(roles, names, devices, strict=False)
    ]
    # Behind those whose copies they keep, for they are ready only when there is somebody to keep copies for.
    return [*engines, *(plan_worker(machine, settings, Role.STORE, name, STORE) for name in names[len(roles) :])], notes


def worker_settings(options: UpOptions, base: Mapping[str, str]) -> dict[str, str]:
    """What all workers are told."""
    optional = {
        "WORKER_MODEL": options.model,
        "WORKER_CONNECTOR": options.connector,
        "WORKER_KV_CACHE_BYTES": str(options.kv_cache_bytes) if options.kv_cache_bytes else "",
        "WORKER_ENGINE_ARGS": options.engine_args,
    }
    return {**base, "WORKER_ENGINE": options.engine, **{name: value for name, value in optional.items() if value}}


def plan_worker(machine: Machine, settings: Mapping[str, str], role: Role, name: str, device: Device) -> ProcessPlan:
    """One worker with its part of the machine."""
    env = {**settings, "WORKER_WORKER_ID": name, "WORKER_ROLE": role.value, **device.env}
    if device.engine_args:
        env["WORKER_ENGINE_ARGS"] = f"{device.engine_args} {settings.get('WORKER_ENGINE_ARGS', '')}".rstrip()
    command = (machine.python, "-m", "services.worker")
    return ProcessPlan(name=name, stage=Stage.WORKERS, command=command, env=env, note=device.words)


def devices_for(options: UpOptions, machine: Machine, count: int, running: int) -> tuple[list[Device], list[str]]:
    """What each worker computes on."""
    if options.engine == "simulated":
        return [Device(words="simulated")] * count, []
    if machine.gpus:
        return share_gpus(machine.gpus, count, running)
    return share_cores(machine.cores, count, running)


def fresh_names(roles: Sequence[Role], names_taken: Sequence[str]) -> Iterator[str]:
    """``prefill-1``, ``decode-1``...: the lowest numbers that nobody has."""
    taken = set(names_taken)
    for role in roles:
        number = next(n for n in range(1, len(taken) + 2) if f"{role.value}-{n}" not in taken)
        taken.add(f"{role.value}-{number}")
        yield f"{role.value}-{number}"
