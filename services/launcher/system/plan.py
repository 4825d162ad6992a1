"""Plans the processes of a system on this machine, with the settings of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from services.launcher.cluster.folder import SECURE, variables
from services.launcher.system.options import UpOptions
from services.launcher.system.process_plan import Machine, PlanRefused, ProcessPlan, RequiredPort, Stage, SystemPlan
from services.launcher.system.worker_plan import plan_workers
from shared.contracts.channels import Party

OPEN = "NATS is open: every user of this machine can read prompts and give orders. Leave out --open to require keys."
LOCAL_HOSTS = ("localhost", "::1")
LOCAL_PREFIX = "127."


def plan_system(options: UpOptions, machine: Machine, names_taken: Sequence[str] = ()) -> SystemPlan:
    """A whole system, or with ``join`` only its further workers. Raises PlanRefused."""
    nats_url = (
        options.nats_url or f"{'tls' if options.keys_dir else 'nats'}://{in_url(options.nats_host)}:{options.nats_port}"
    )
    base = {party: base_environment(options, nats_url, party) for party in Party}
    workers, notes = plan_workers(options, machine, base[Party.WORKER], names_taken)
    if options.join and (given := for_new_systems(options)):
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
    ports.append(RequiredPort(host=options.nats_host, port=options.nats_port, option="--nats-port", purpose="NATS"))
    nats = plan_nats(options, machine)
    if not options.keys_dir:
        notes.append(OPEN)
    return SystemPlan(processes=(nats, *services, *workers), ports=tuple(ports), nats_url=nats_url, notes=tuple(notes))


def in_url(host: str) -> str:
    """An address as a URL has it."""
    return f"[{host}]" if ":" in host else host


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    return host in LOCAL_HOSTS or host.startswith(LOCAL_PREFIX)


def base_environment(options: UpOptions, nats_url: str, party: Party) -> dict[str, str]:
    """Environment of every process of that party."""
    base = {"BATON_NATS_URL": nats_url, "BATON_STATE_DIR": options.state_dir}
    return {**base, **variables(options.keys_dir, party)} if options.keys_dir else base


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
    return ProcessPlan(name="nats", stage=Stage.NATS, command=(machine.nats_server, *flags, *secured))


def service(machine: Machine, name: str, base: Mapping[str, str], *, host: str = "", port: int = 0) -> ProcessPlan:
    """A router, orchestrator or collector; ``host`` and ``port`` for those that serve HTTP."""
    prefix = name.upper()
    listens = {f"{prefix}_HOST": host, f"{prefix}_PORT": str(port)} if port else {}
    command = (machine.python, "-m", f"services.{name}")
    return ProcessPlan(name=name, stage=Stage.SERVICES, command=command, env={**base, **listens})


def plan_orchestrator(options: UpOptions, machine: Machine, base: Mapping[str, str]) -> ProcessPlan:
    """With its planner on when scaling is allowed."""
    return aside(service(machine, "orchestrator", {**base, **planner_limits(options), **sleep_limits(options)}))


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
    if len(options.models) == 1:
        [model] = options.models
        return {
            "ORCHESTRATOR_PLANNER": "act",
            "ORCHESTRATOR_PLANNER_WORKERS_MIN": str(model.workers_min),
            "ORCHESTRATOR_PLANNER_WORKERS_MAX": str(model.workers_max),
        }
    # Of a model that does not scale, the planner may change roles.
    limits = {
        each.model: {
            "workers_min": each.workers_min if each.workers_max else len(each.roles),
            "workers_max": each.workers_max or len(each.roles),
        }
        for each in options.models
    }
    return {"ORCHESTRATOR_PLANNER": "act", "ORCHESTRATOR_PLANNER_MODELS": msgspec.json.encode(limits).decode()}


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
