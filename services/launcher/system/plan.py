"""Plans the processes of a system on this machine, with the settings of each."""

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
    """The requested system cannot be started; the message says what to do instead."""


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `baton up`."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    store: int = 0
    """Workers that store KV blocks and compute nothing."""
    model: str = ""
    """Empty: the worker's default."""
    engine: Literal["vllm", "simulated"] = "vllm"
    connector: Literal["baton", "upstream", ""] = ""
    """KV connector of vLLM engines; empty: the worker's default."""
    host: str = "127.0.0.1"
    port: int = 8000
    routers: int = 1
    """Several routers share ``port``."""
    router_ports: tuple[int, ...] = ()
    """With several routers, each one's own port."""
    collector_host: str = "127.0.0.1"
    collector_port: int = 8001
    nats_port: int = 4222
    nats_url: str = ""
    """A running NATS; empty: start one."""
    keys_dir: str = ""
    """A folder of `baton init`: NATS requires keys and TLS. Empty: neither (`baton up --open`, or another NATS)."""
    state_dir: str
    kv_cache_bytes: int = 0
    engine_args: str = ""
    insecure: bool = False
    """Serve every client that reaches ``host``, without API keys."""
    access_configured: bool = False
    """The environment configures client access to the routers."""
    join: bool = False
    workers_min: int = 1
    workers_max: int = 0
    """Above 0: the planner may start and drain workers up to this number; 0: no scaling."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine."""

    python: str
    nats_server: str
    """Path of the binary; empty when there is none."""
    cores: tuple[int, ...]
    """One logical CPU per physical core that this process may use."""
    gpus: tuple[str, ...] = ()
    """GPU indexes; empty when the installed engine is the CPU one."""


STORES = f"{Role.STORE.value}-"
"""Prefix of store workers' names: they need no device."""
STORE = Device(text="no engine")
OPEN = "NATS is open: every user of this machine can read prompts and give orders. Leave out --open to require keys."
LOCAL_HOSTS = ("localhost", "::1")
LOCAL_PREFIX = "127."


class Stage(IntEnum):
    """Processes start in this order and stop in reverse."""

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
    """Where it runs, such as "core 0"."""
    is_extra: bool = False
    """The system continues if this process cannot be started."""
    serves_requests: bool = True
    """False: requests are served without it, so it is restarted even if its configuration is wrong."""


@dataclass(frozen=True, kw_only=True)
class RequiredPort:
    """A port that must be free before anything starts."""

    host: str
    port: int
    option: str
    purpose: str


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """Everything `baton up` starts."""

    processes: tuple[ProcessPlan, ...]
    ports: tuple[RequiredPort, ...]
    nats_url: str
    notes: tuple[str, ...] = ()
    """Warnings to print before the start."""

    def stage(self, stage: Stage) -> list[ProcessPlan]:
        """The processes of one stage, in order."""
        return [process for process in self.processes if process.stage is stage]


def plan_system(options: UpOptions, machine: Machine, names_taken: Sequence[str] = ()) -> SystemPlan:
    """A whole system, or with ``join`` only its further workers. Raises PlanRefused."""
    nats_url = options.nats_url or f"{'tls' if options.keys_dir else 'nats'}://127.0.0.1:{options.nats_port}"
    base = {party: base_environment(options, nats_url, party) for party in Party}
    workers, notes = plan_workers(options, machine, base[Party.WORKER], names_taken)
    if options.join and (options.routers > 1 or options.workers_max):
        given = "--routers" if options.routers > 1 else "--workers-max"
        raise PlanRefused(f"{given} is for a new system: --join adds workers only.")
    if options.join:
        return SystemPlan(processes=tuple(workers), ports=(), nats_url=nats_url, notes=tuple(notes))
    check_access(options)
    ports = [
        RequiredPort(host=options.host, port=options.port, option="--port", purpose="the OpenAI API"),
        RequiredPort(
            host=options.collector_host, port=options.collector_port, option="--collector-port", purpose="metrics"
        ),
    ]
    services = [
        plan_orchestrator(options, machine, base[Party.ORCHESTRATOR]),
        plan_collector(options, machine, base[Party.COLLECTOR]),
        *plan_routers(options, machine, base[Party.ROUTER]),
    ]
    if options.nats_url:
        return SystemPlan(processes=(*services, *workers), ports=tuple(ports), nats_url=nats_url, notes=tuple(notes))
    ports.append(RequiredPort(host="127.0.0.1", port=options.nats_port, option="--nats-port", purpose="NATS"))
    nats = plan_nats(options, machine)
    if not options.keys_dir:
        notes.append(OPEN)
    return SystemPlan(processes=(nats, *services, *workers), ports=tuple(ports), nats_url=nats_url, notes=tuple(notes))


def check_access(options: UpOptions) -> None:
    """Other machines need API keys. Raises PlanRefused."""
    if options.insecure or options.access_configured:
        return
    for option, host, what in (
        ("--host", options.host, "the API"),
        ("--collector-host", options.collector_host, "the console and metrics"),
    ):
        if not (host in LOCAL_HOSTS or host.startswith(LOCAL_PREFIX)):
            raise PlanRefused(
                f"With {option} {host} other machines can reach {what}, but there are no API keys. Create one with "
                "`baton keys new --tenant NAME --file keys.toml` and start with ROUTER_KEYS_FILE=keys.toml. On a "
                "trusted network, --insecure serves without keys."
            )


def base_environment(options: UpOptions, nats_url: str, party: Party) -> dict[str, str]:
    """Environment of every process of that party."""
    base = {"BATON_NATS_URL": nats_url, "BATON_STATE_DIR": options.state_dir}
    return {**base, **variables(options.keys_dir, party)} if options.keys_dir else base


def plan_nats(options: UpOptions, machine: Machine) -> ProcessPlan:
    """nats-server with JetStream, on loopback."""
    if not machine.nats_server:
        raise PlanRefused(
            "No nats-server was found. `make setup` installs one. Or name a binary in BATON_NATS_SERVER, "
            "or a running NATS with --nats-url."
        )
    store = f"{options.state_dir}/nats"
    flags = ("--addr", "127.0.0.1", "--port", str(options.nats_port), "--jetstream", "--store_dir", store)
    secured = ("--config", f"{options.keys_dir}/{SECURE}") if options.keys_dir else ()
    return ProcessPlan(name="nats", stage=Stage.NATS, command=(machine.nats_server, *flags, *secured))


def service(machine: Machine, name: str, base: Mapping[str, str], *, host: str = "", port: int = 0) -> ProcessPlan:
    """A router, orchestrator or collector; ``host`` and ``port`` for those that serve HTTP."""
    prefix = name.upper()
    listens = {f"{prefix}_HOST": host, f"{prefix}_PORT": str(port)} if port else {}
    command = (machine.python, "-m", f"services.{name}")
    return ProcessPlan(name=name, stage=Stage.SERVICES, command=command, env={**base, **listens})


def plan_orchestrator(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> ProcessPlan:
    """With its planner on when scaling is allowed."""
    limits = {
        "ORCHESTRATOR_PLANNER": "act",
        "ORCHESTRATOR_PLANNER_WORKERS_MIN": str(options.workers_min),
        "ORCHESTRATOR_PLANNER_WORKERS_MAX": str(options.workers_max),
    }
    return aside(service(machine, "orchestrator", {**base, **limits} if options.workers_max else base))


def plan_collector(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> ProcessPlan:
    """On an address of its own: whoever reaches the API need not reach the console."""
    base = {**base, "COLLECTOR_INSECURE": "true"} if options.insecure else base
    return aside(service(machine, "collector", base, host=options.collector_host, port=options.collector_port))


def aside(process: ProcessPlan) -> ProcessPlan:
    """It takes no part in serving requests."""
    return replace(process, serves_requests=False)


def plan_routers(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> list[ProcessPlan]:
    """One router on the port, or several that share it; then each also has its own port."""
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
    """The workers with their devices, and warnings. Raises PlanRefused."""
    roles = [Role.PREFILL] * options.prefill + [Role.DECODE] * options.decode + [Role.BOTH] * options.both
    if not roles and not (options.join and options.store):
        raise PlanRefused("No workers: request at least one with --prefill, --decode or --both.")
    if options.store and options.connector == "upstream":
        raise PlanRefused("--store needs the KV exchange: leave out --connector upstream.")
    if roles and not options.join and not options.both and not (options.prefill and options.decode):
        missing, given = ("decode", "--prefill") if options.prefill else ("prefill", "--decode")
        raise PlanRefused(f"Only {given} workers: none would {missing}. Add --{missing} 1 or --both 1.")
    if options.workers_max and not options.workers_min <= len(roles) <= options.workers_max:
        raise PlanRefused(
            f"{len(roles)} workers are not between --workers-min {options.workers_min} and "
            f"--workers-max {options.workers_max}."
        )
    names = list(fresh_names([*roles, *[Role.STORE] * options.store], names_taken))
    # Devices are divided among all workers that may ever run; otherwise the first ones would get everything.
    count, running = max(len(roles), options.workers_max), sum(not name.startswith(STORES) for name in names_taken)
    devices, notes = devices_for(options, machine, count, running) if count else ([], [])
    settings = worker_settings(options, base)
    engines = [
        plan_worker(machine, settings, role, name, device)
        for role, name, device in zip(roles, names, devices, strict=False)
    ]
    # Stores start last: they become ready only when engines are there.
    return [*engines, *(plan_worker(machine, settings, Role.STORE, name, STORE) for name in names[len(roles) :])], notes


def worker_settings(options: UpOptions, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of all workers."""
    optional = {
        "WORKER_MODEL": options.model,
        "WORKER_CONNECTOR": options.connector,
        "WORKER_KV_CACHE_BYTES": str(options.kv_cache_bytes) if options.kv_cache_bytes else "",
        "WORKER_ENGINE_ARGS": options.engine_args,
    }
    return {**base, "WORKER_ENGINE": options.engine, **{name: value for name, value in optional.items() if value}}


def plan_worker(machine: Machine, settings: Mapping[str, str], role: Role, name: str, device: Device) -> ProcessPlan:
    """One worker on its device."""
    env = {**settings, "WORKER_WORKER_ID": name, "WORKER_ROLE": role.value, **device.env}
    if device.engine_args:
        env["WORKER_ENGINE_ARGS"] = f"{device.engine_args} {settings.get('WORKER_ENGINE_ARGS', '')}".rstrip()
    command = (machine.python, "-m", "services.worker")
    return ProcessPlan(name=name, stage=Stage.WORKERS, command=command, env=env, note=device.text)


def devices_for(options: UpOptions, machine: Machine, count: int, running: int) -> tuple[list[Device], list[str]]:
    """A device for each worker, and warnings."""
    if options.engine == "simulated":
        return [Device(text="simulated")] * count, []
    if machine.gpus:
        return share_gpus(machine.gpus, count, running)
    return share_cores(machine.cores, count, running)


def fresh_names(roles: Sequence[Role], names_taken: Sequence[str]) -> Iterator[str]:
    """``prefill-1``, ``decode-1``...: the lowest free numbers."""
    taken = set(names_taken)
    for role in roles:
        number = next(n for n in range(1, len(taken) + 2) if f"{role.value}-{n}" not in taken)
        taken.add(f"{role.value}-{number}")
        yield f"{role.value}-{number}"
