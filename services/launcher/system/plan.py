"""Plans the processes of a system on this machine, with the settings of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from services.launcher.cluster.folder import SECURE, variables
from services.launcher.system.devices import Device, in_stages, share_cores, share_gpus
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.process_plan import (
    MODULES,
    Machine,
    PlanRefused,
    ProcessPlan,
    RequiredPort,
    Stage,
    SystemPlan,
)
from shared.addresses import host_port, url_of
from shared.contracts.channels import Party
from shared.contracts.ids import ALIAS_RULE, is_model_alias
from shared.contracts.permissions import owner_of
from shared.contracts.workers import Role
from shared.loopback import is_loopback

OPEN = "NATS is open: every user of this machine can read prompts and give orders. Leave out --open to require keys."


def plan_system(options: UpOptions, machine: Machine, names_taken: Sequence[str] = ()) -> SystemPlan:
    """A whole system, or with ``join`` only its further workers. Raises PlanRefused."""
    scheme = "tls" if options.keys_dir else "nats"
    nats_url = options.nats_url or url_of(scheme, options.nats_host, options.nats_port)
    base = {party: base_environment(options, nats_url, party) for party in Party}
    workers, notes = plan_workers(options, machine, base[Party.WORKER], names_taken)
    if options.join and (given := for_new_systems(options)):
        raise PlanRefused(f"{given} is for a new system: --join adds workers only.")
    processes: list[ProcessPlan] = []
    if not options.join:
        check_access(options)
        if not options.nats_url:
            processes.append(plan_nats(options, machine))
            notes += [] if options.keys_dir else [OPEN]
        processes.append(plan_orchestrator(options, machine, base[Party.ORCHESTRATOR]))
        processes.append(plan_collector(options, machine, base[Party.COLLECTOR]))
        processes += plan_routers(options, machine, base[Party.ROUTER])
    ports = () if options.join else required_ports(options)
    return SystemPlan(processes=(*processes, *workers), ports=ports, nats_url=nats_url, notes=tuple(notes))


def required_ports(options: UpOptions) -> tuple[RequiredPort, ...]:
    """Ports of a new system that must be free. NATS has one unless another one is used."""
    api = RequiredPort(host=options.host, port=options.port, option="--port", purpose="the OpenAI API")
    metrics = RequiredPort(
        host=options.collector_host, port=options.collector_port, option="--collector-port", purpose="metrics"
    )
    nats = RequiredPort(host=options.nats_host, port=options.nats_port, option="--nats-port", purpose="NATS")
    return (api, metrics) if options.nats_url else (api, metrics, nats)


def for_new_systems(options: UpOptions) -> str:
    """The first option given that workers which join cannot have; empty if there is none."""
    given = {
        "--routers": options.routers > 1,
        "--workers-max": options.scales,
        "--awake-max": options.awake_max,
        "--sleep-after": any(each.sleep_after_s for each in options.models),
    }
    return next((name for name, is_given in given.items() if is_given), "")


def check_access(options: UpOptions) -> None:
    """Other machines need API keys. Raises PlanRefused."""
    if not is_loopback(options.nats_host) and not options.keys_dir:
        raise PlanRefused(f"With --nats-host {options.nats_host} other machines can reach NATS: leave out --open.")
    if options.insecure or options.access_configured:
        return
    for option, host, what in (
        ("--host", options.host, "the API"),
        ("--collector-host", options.collector_host, "the console and metrics"),
    ):
        if not is_loopback(host):
            raise PlanRefused(
                f"With {option} {host} other machines can reach {what}, but there are no API keys. Create one with "
                "`baton keys new --tenant NAME --file keys.toml` and start with ROUTER_KEYS_FILE=keys.toml. On a "
                "trusted network, --insecure serves without keys."
            )


def base_environment(options: UpOptions, nats_url: str, party: Party) -> dict[str, str]:
    base = {"BATON_NATS_URL": nats_url, "BATON_STATE_DIR": options.state_dir}
    return {**base, **variables(options.keys_dir, party)} if options.keys_dir else base


CORES_PER_NATS_THREAD = 8
"""Cores for each thread of nats-server. With its default of a thread for each core, its threads wake one another
through the kernel, on cores that engines need: on two cores, one thread took 51 us of CPU for each event of a stream
and two took 72 (4 streams at once, 720 events/s).
"""


def plan_nats(options: UpOptions, machine: Machine) -> ProcessPlan:
    """nats-server with JetStream."""
    if not machine.nats_server:
        raise PlanRefused(
            "No nats-server was found. `make setup` installs one. Or name a binary in BATON_NATS_SERVER, "
            "or a running NATS with --nats-url."
        )
    store = f"{options.state_dir}/nats"
    flags = ("--addr", options.nats_host, "--port", str(options.nats_port), "--jetstream", "--store_dir", store)
    secured = ("--config", f"{options.keys_dir}/{SECURE}") if options.keys_dir else ()
    threads = {"GOMAXPROCS": str(max(1, len(machine.cores) // CORES_PER_NATS_THREAD))}
    return ProcessPlan(name="nats", stage=Stage.NATS, command=(machine.nats_server, *flags, *secured), env=threads)


def service(machine: Machine, party: Party, base: Mapping[str, str], *, host: str = "", port: int = 0) -> ProcessPlan:
    """A router, orchestrator or collector; ``host`` and ``port`` for those that serve HTTP."""
    prefix = party.upper()
    listens = {f"{prefix}_HOST": host, f"{prefix}_PORT": str(port)} if port else {}
    command = (machine.python, "-m", MODULES[party])
    return ProcessPlan(name=party.value, stage=Stage.SERVICES, command=command, env={**base, **listens})


def plan_orchestrator(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> ProcessPlan:
    """With its planner on when scaling is allowed."""
    return aside(service(machine, Party.ORCHESTRATOR, {**base, **planner_limits(options), **sleep_limits(options)}))


def sleep_limits(options: UpOptions) -> dict[str, str]:
    """Which models sleep, and how many may be awake; only what the options say."""
    limits = {}
    if after_s := {each.model: each.sleep_after_s for each in options.models if each.sleep_after_s}:
        limits["ORCHESTRATOR_SLEEP_AFTER_S"] = msgspec.json.encode(after_s).decode()
    if options.awake_max:
        limits["ORCHESTRATOR_AWAKE_MAX"] = str(options.awake_max)
    return limits


def planner_limits(options: UpOptions) -> dict[str, str]:
    """The planner's settings; none when nothing scales."""
    if not options.scales:
        return {}
    # Of a model that does not scale, the planner may change roles.
    limits = {
        each.model if len(options.models) > 1 else "*": {
            "workers_min": each.workers_min if each.workers_max else len(each.roles),
            "workers_max": each.workers_max or len(each.roles),
        }
        for each in options.models
    }
    return {"ORCHESTRATOR_PLANNER": "act", "ORCHESTRATOR_PLANNER_MODELS": msgspec.json.encode(limits).decode()}


def plan_collector(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> ProcessPlan:
    """On an address of its own: whoever reaches the API need not reach the console."""
    base = {**base, "COLLECTOR_INSECURE": "true"} if options.insecure else base
    return aside(service(machine, Party.COLLECTOR, base, host=options.collector_host, port=options.collector_port))


def aside(process: ProcessPlan) -> ProcessPlan:
    """It takes no part in serving requests."""
    return replace(process, serves_requests=False)


def plan_routers(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> list[ProcessPlan]:
    """One router on the port, or several that share it; then each also has its own port."""
    base = {**base, "ROUTER_INSECURE": "true"} if options.insecure else base
    if options.routers == 1:
        return [service(machine, Party.ROUTER, base, host=options.host, port=options.port)]
    routers = []
    for number, port in enumerate(options.router_ports, 1):
        name = f"router-{number}"
        alone = service(machine, Party.ROUTER, base, host=options.host, port=port)
        env = {**alone.env, "ROUTER_SHARED_PORT": str(options.port), "ROUTER_INSTANCE": name}
        routers.append(replace(alone, name=name, env=env))
    return routers


STORES = f"{Role.STORE.value}-"
"""Prefix of store workers' names: they need no device."""
STORE = Device(text="no engine")
ATTACHED = "attached"
OWN_RANKS = re.compile(
    r"(^|\s)(--(tensor|pipeline)[-_]parallel[-_]size|-tp|-pp|--data[-_]parallel([-_][a-z-_]+)?|-dp[a-z]?)([=\s]|$)"
)


def plan_workers(
    options: UpOptions, machine: Machine, base: Mapping[str, str], names_taken: Sequence[str]
) -> tuple[list[ProcessPlan], list[str]]:
    """The workers with their devices, and warnings. Raises PlanRefused."""
    check(options)
    engines = [(index, role) for index, each in enumerate(options.models) for role in each.roles]
    stores = [(index, Role.STORE) for index, each in enumerate(options.models) for _ in range(each.store)]
    attached = [(index, server) for index, each in enumerate(options.models) for server in each.attach]
    names = worker_names(options.models, options.host_name, names_taken)
    running = sum(not name.startswith((STORES, f"{ATTACHED}-")) for name in names_taken)
    devices, notes = devices_by_model(options, machine, running)
    unused = [iter(each) for each in devices]
    workers = WorkerPlans(options, machine, base)
    plans = [
        workers.plan(index, role, name, next(unused[index]), engines[:number].count((index, role)))
        for number, ((index, role), name) in enumerate(zip(engines, names, strict=False))
    ]
    plans = list(in_groups(plans, [(options.models[index], role) for index, role in engines]))
    # Stores start last: they become ready only when engines are there.
    plans += [workers.plan(index, role, name, STORE) for (index, role), name in zip(stores, names, strict=False)]
    plans += [workers.attached(index, server, name) for (index, server), name in zip(attached, names, strict=True)]
    return plans, notes


def in_groups(plans: Sequence[ProcessPlan], roles: Sequence[tuple[ModelOptions, Role]]) -> Iterator[ProcessPlan]:
    """The workers as ranks of data parallel groups: as many as a group has here in a row. ``roles``: of each one, with
    its model.
    """
    name, rank = "", 0
    for plan, (model, role) in zip(plans, roles, strict=True):
        size, here, span = model.group_of(role), model.group_here(role), model.spans.get(role)
        if size == 1:
            yield plan
            continue
        # On several hosts, the address at which a group meets is the name that all know.
        name = name if rank else plan.env.get("WORKER_HEAD_ADDRESS", plan.name)
        number = rank + (span.node * here if span is not None else 0)
        place = {
            "WORKER_DATA_PARALLEL_SIZE": str(size),
            "WORKER_DATA_PARALLEL_RANK": str(number),
            "WORKER_DATA_PARALLEL_GROUP": name,
        }
        note = ", ".join(filter(None, (plan.note, f"rank {number} of {name}")))
        yield replace(plan, env={**plan.env, **place}, group=name, note=note)
        rank = (rank + 1) % here


@dataclass(frozen=True)
class WorkerPlans:
    options: UpOptions
    machine: Machine
    base: Mapping[str, str]
    """The environment of all workers."""

    def plan(self, model: int, role: Role, name: str, device: Device, nth: int = 0) -> ProcessPlan:
        """A worker of ``options.models[model]`` on its device, or this host's part of one. ``nth``: of its role."""
        of_model = self.options.models[model]
        settings = worker_settings(self.options, of_model, self.base)
        device = in_stages(device, of_model.stages_of(role), of_model.hosts_of(role))
        env = {**settings, "WORKER_WORKER_ID": name, "WORKER_ROLE": role.value, **device.env}
        if span := of_model.spans.get(role):
            env["WORKER_HEAD_ADDRESS"] = host_port(span.address, span.port + nth // of_model.group_here(role))
            if of_model.group_of(role) == 1:
                env |= {"WORKER_NODES": str(span.nodes), "WORKER_NODE": str(span.node)}
        if role is Role.STORE:
            env |= of_model.store_settings
        if self.options.own_keys:
            env |= variables(self.options.keys_dir, owner_of(Party.WORKER, name))
        if self.options.awake_max and model >= self.options.awake_max and role is not Role.STORE:
            env["WORKER_ASLEEP"] = "true"
        if device.engine_args:
            env["WORKER_ENGINE_ARGS"] = f"{device.engine_args} {settings.get('WORKER_ENGINE_ARGS', '')}".rstrip()
        command = (self.machine.python, "-m", MODULES[Party.WORKER])
        several, keeps_trying = len(self.options.models) > 1, self.options.keep_trying
        note = f"{self.options.models[model].model}, {device.text}" if several else device.text
        return ProcessPlan(
            name=name,
            stage=Stage.WORKERS,
            command=command,
            env=env,
            note=note,
            model=model,
            is_extra=keeps_trying,
            keeps_trying=keeps_trying,
        )

    def attached(self, model: int, server: str, name: str) -> ProcessPlan:
        """A worker of ``options.models[model]`` without an engine, for this server."""
        url, _, theirs = server.partition("=")
        plan = self.plan(model, Role.BOTH, name, Device(text=f"attached to {url}"))
        key_file = self.options.models[model].attach_key_file
        attach = {"WORKER_ENGINE": ATTACHED, "WORKER_ATTACH_URL": url}
        attach |= {"WORKER_ATTACH_MODEL": theirs} if theirs else {}
        attach |= {"WORKER_ATTACH_KEY_FILE": key_file} if key_file else {}
        return replace(plan, env={**plan.env, **attach})


def check(options: UpOptions) -> None:
    """Whether these workers can serve their models. Raises PlanRefused."""
    for each in options.models:
        _check_model(each, options)
    names = [each.model for each in options.models]
    if len(names) > 1 and "" in names:
        raise PlanRefused("--model is empty: with several models, each needs its name.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanRefused(f"--model {twice[0]} is given twice: name all its workers after one --model.")
    _check_aliases(options)
    if any(each.sleep_after_s and not each.model for each in options.models):
        raise PlanRefused("--sleep-after needs the model's name: give --model, too.")
    if options.awake_max and options.awake_max >= len(options.models):
        raise PlanRefused(f"--awake-max {options.awake_max} changes nothing: there are {len(options.models)} models.")


def _check_aliases(options: UpOptions) -> None:
    """Every name must mean one model."""
    names = [name for each in options.models for name in (each.model, *dict.fromkeys(each.aliases))]
    for alias in (alias for each in options.models for alias in each.aliases):
        if not is_model_alias(alias):
            raise PlanRefused(f"--alias {alias}: write {ALIAS_RULE}.")
        if names.count(alias) > 1:
            raise PlanRefused(f"--alias {alias}: another model has this name, so requests for it could mean either.")


def _check_model(model: ModelOptions, options: UpOptions) -> None:
    of = f" for {model.model}" if len(options.models) > 1 else ""
    count = len(model.roles)
    is_part = options.join or bool(options.host_name)
    if not count and not model.attach and not (is_part and model.store):
        raise PlanRefused(f"No workers{of}: request at least one with --prefill, --decode, --both or --attach.")
    _check_attached(model, options)
    if model.store and model.connector == "upstream":
        raise PlanRefused(
            "--store, --host-memory and --object-store need the KV exchange: leave out --connector upstream."
        )
    if count and not is_part and not model.both and not (model.prefill and model.decode):
        missing, given = ("decode", "--prefill") if model.prefill else ("prefill", "--decode")
        raise PlanRefused(f"Only {given} workers{of}: none would {missing}. Add --{missing} 1 or --both 1.")
    _check_gpus(model, options)
    if model.workers_max and not model.workers_min <= count <= model.workers_max:
        raise PlanRefused(
            f"{count} workers{of} are not between --workers-min {model.workers_min} and "
            f"--workers-max {model.workers_max}."
        )


def _check_attached(model: ModelOptions, options: UpOptions) -> None:
    if model.attach_key_file and not model.attach:
        raise PlanRefused("--attach-key-file has the key for a server: give the server with --attach URL.")
    if model.attach and (model.sleep_after_s or options.awake_max):
        raise PlanRefused("--attach: its server runs elsewhere and cannot sleep: leave out --sleep-after, --awake-max.")
    for server in model.attach:
        if not server.startswith(("http://", "https://")):
            raise PlanRefused(f"--attach {server}: write it as http://HOST:PORT or http://HOST:PORT=MODEL.")


def _check_gpus(model: ModelOptions, options: UpOptions) -> None:
    counts = {model.gpus_of(role) for role in model.roles}
    if OWN_RANKS.search(model.engine_args):
        raise PlanRefused(
            "--engine-args sets the number of ranks or stages, but `baton up` gives each worker its GPUs or cores: use "
            "--gpus-per-worker N, --pipeline N and --data-parallel N, or those for prefill and decode workers."
        )
    if (counts - {1} or model.spans) and options.engine == "simulated":
        raise PlanRefused("Simulated engines have no ranks: leave out --gpus-per-worker, --pipeline and further hosts.")
    _check_groups(model, options)
    for role in model.roles:
        gpus, stages = model.gpus_of(role) * model.hosts_of(role), model.stages_of(role)
        if gpus % stages:
            raise PlanRefused(
                f"{gpus} GPUs of a {role.value} worker cannot be shared out over {stages} pipeline stages: give it a "
                f"multiple of {stages} with --gpus-per-worker, or other stages with --pipeline."
            )
    if counts - {model.gpus_of(Role.BOTH)} and model.workers_max:
        raise PlanRefused("--workers-max starts workers of one size: use --gpus-per-worker alone.")


def _check_groups(model: ModelOptions, options: UpOptions) -> None:
    """Whether the workers can form data parallel groups. Raises PlanRefused."""
    if all(model.group_of(role) == 1 for role in model.roles):
        return
    if options.engine == "simulated":
        raise PlanRefused("Simulated engines have no experts to share out: leave out --data-parallel.")
    if model.connector == "upstream":
        raise PlanRefused("--data-parallel needs the KV exchange: leave out --connector upstream.")
    if model.sleep_after_s or options.awake_max:
        raise PlanRefused("--data-parallel: its workers do not sleep: leave out --sleep-after and --awake-max.")
    if model.workers_max:
        raise PlanRefused("--workers-max starts and drains single workers, and a data parallel group has several.")


def devices_by_model(options: UpOptions, machine: Machine, running: int) -> tuple[list[list[Device]], list[str]]:
    """A device for each worker that may ever run, by model, and warnings. Were only the first workers counted, they
    would get the whole machine. ``running``: engines that run here already.
    """
    if options.awake_max == 1 and len(options.models) > 1:  # Each has the machine for itself while it is awake.
        alone = [msgspec.structs.replace(options, models=(each,)) for each in options.models]
        shared = [devices_by_model(each, machine, running) for each in alone]
        return [devices[0] for devices, _notes in shared], [note for _devices, notes in shared for note in notes]
    gpus = [count for each in options.models for count in each.gpu_counts]
    if not gpus:
        return [[] for _ in options.models], []
    if options.engine == "simulated":
        devices, notes = [Device(text="simulated")] * len(gpus), list[str]()
    elif machine.gpus:
        devices, notes = share_gpus(machine, gpus, running)
    else:
        devices, notes = share_cores(machine.cores, gpus, running, machine.nodes)
    unused = iter(devices)
    return [[next(unused) for _ in each.gpu_counts] for each in options.models], notes


def worker_settings(options: UpOptions, model: ModelOptions, base: Mapping[str, str]) -> dict[str, str]:
    optional = {
        "WORKER_MODEL": model.model,
        "WORKER_ALIASES": ",".join(model.aliases),
        "WORKER_CONNECTOR": model.connector,
        "WORKER_KV_BACKEND": model.kv_backend,
        "WORKER_KV_CACHE_BYTES": str(model.kv_cache_bytes) if model.kv_cache_bytes else "",
        "WORKER_ENGINE_ARGS": model.engine_args,
    }
    return {**base, "WORKER_ENGINE": options.engine, **{name: value for name, value in optional.items() if value}}


def worker_names(models: Sequence[ModelOptions], host_name: str, names_taken: Sequence[str] = ()) -> Iterator[str]:
    """Ids for the workers of these models: those with engines, then stores, then attached ones."""
    kinds = [role.value for each in models for role in each.roles]
    kinds += [Role.STORE.value for each in models for _ in range(each.store)]
    kinds += [ATTACHED for each in models for _ in each.attach]
    prefix = f"{host_name}-" if host_name else ""
    taken = [name.removeprefix(prefix) for name in names_taken if name.startswith(prefix)]
    return (f"{prefix}{name}" for name in fresh_names(kinds, taken))


def fresh_names(kinds: Sequence[str], names_taken: Sequence[str]) -> Iterator[str]:
    """``prefill-1``, ``decode-1``...: the lowest free numbers."""
    taken = set(names_taken)
    for kind in kinds:
        number = next(n for n in range(1, len(taken) + 2) if f"{kind}-{n}" not in taken)
        taken.add(f"{kind}-{number}")
        yield f"{kind}-{number}"
