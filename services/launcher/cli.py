"""The ``baton`` command."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.launcher.commands import doctor as doctor_command
from services.launcher.commands import init as init_command
from services.launcher.commands import keys as key_commands
from services.launcher.commands import orders as order_commands
from services.launcher.commands import plan as plan_command
from services.launcher.commands import views as view_commands
from services.launcher.commands.init import keys_folder
from services.launcher.commands.options import (
    WIDTH_OF_FILES,
    NatsUrl,
    StateDir,
    common_settings,
    fail,
    find_nats,
    no_nats,
)
from services.launcher.commands.plugins import mount
from services.launcher.system import state_file
from services.launcher.system.machine import KEYS_VARIABLE
from services.launcher.system.plan import UpOptions
from services.launcher.system.sizes import parse_bytes
from shared.bus.port import BusError
from shared.contracts.control import ServicePhase
from shared.contracts.message import in_full

DOWN_S_MAX = 120.0
HEALTH_S = 5.0
ROUTERS_MAX = 64
ENTRANCE_VARIABLES = (KEYS_VARIABLE, "ROUTER_KEYS", "ROUTER_INSECURE")
"""By which the user has said who may ask; routers judge what they say."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve large language models with prefill and decode on separate vLLM engines.",
)


class EngineKind(StrEnum):
    """What computes."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class Connector(StrEnum):
    """What moves KV between vLLM engines."""

    BATON = "baton"
    UPSTREAM = "upstream"


WorkersMax = Annotated[
    int, typer.Option(min=0, help="Let the planner start and drain workers, up to so many.", show_default="it does not")
]


@app.command(
    epilog="""[bold]Examples[/]

[cyan]baton up[/]   one prefill and one decode worker with the built-in tiny model

[cyan]baton up --prefill 2 --decode 2 --model Qwen/Qwen3-0.6B[/]   from Hugging Face

[cyan]baton up --both 1 --engine simulated[/]   no vLLM needed: to try out clients

[cyan]baton up --routers 2[/]   two routers behind one address

[cyan]baton up --store 1[/]   what engines forget or take with them is kept; WORKER_STORE_* says how much

[cyan]baton up --join --decode 1[/]   on a second terminal: one more worker

[cyan]baton up --secure[/]   NATS lets in only those who have keys, each for its own part, and speaks TLS

[cyan]baton up --workers-max 4[/]   as many of each role as the traffic wants, up to four

[cyan]baton up --engine-args "--max-num-seqs 64"[/]   anything else vLLM understands

Services take further settings from the environment: ROUTER_*, WORKER_*, COLLECTOR_*,
ORCHESTRATOR_*; BATON_OTLP_ENDPOINT turns tracing on. WORKER_CACHE_HIT_THRESHOLD=0.5
refuses what is mostly not cached; WORKER_KV_FETCH_MIN_TOKENS and WORKER_KV_LEASE_S
say what of KV is worth fetching, and how long it is kept for others."""
)
def up(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers.", show_default="1")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers.", show_default="1")] = None,
    both: Annotated[int | None, typer.Option(min=0, help="Workers that do both.", show_default="0")] = None,
    store: Annotated[int, typer.Option(min=0, help="Workers that keep copies of KV, in memory and in files.")] = 0,
    model: Annotated[str, typer.Option(help="Hugging Face id or local path.", show_default="baton-tiny")] = "",
    engine: Annotated[EngineKind | None, typer.Option(help="What computes.", show_default="vllm")] = None,
    connector: Annotated[
        Connector | None,
        typer.Option(help="What moves KV: the KV exchange, or vLLM's own NixlConnector.", show_default="baton"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the OpenAI API.")] = 8000,
    routers: Annotated[int, typer.Option(min=1, max=ROUTERS_MAX, help="Routers that share this port.")] = 1,
    collector_port: Annotated[int, typer.Option(help="Port of the fleet's metrics.")] = 8001,
    nats_port: Annotated[int, typer.Option(help="Port for the NATS that is started.")] = 4222,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    kv_cache: Annotated[str, typer.Option(help="KV cache per worker, like 512M or 8G.", show_default="vLLM's")] = "",
    engine_args: Annotated[str, typer.Option(help="Further vLLM arguments, in quotes.", show_default=False)] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines ask without API keys.")] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="NATS asks for keys and speaks TLS; see `baton init`.")
    ] = False,
    join: Annotated[bool, typer.Option("--join", help="Only add workers to the system that runs already.")] = False,
    workers_min: Annotated[int, typer.Option(min=1, help="Workers that the planner leaves running.")] = 1,
    workers_max: WorkersMax = 0,
) -> None:
    """Start the whole system on this machine and stay until Ctrl-C."""
    common = common_settings()
    running = state_file.find(state_dir or Path(common.state_dir)) if join else None
    if prefill is decode is both is None:
        prefill, decode, both = (0, 0, 0 if store else 1) if join else (1, 1, 0)
    options = UpOptions(
        prefill=prefill or 0,
        decode=decode or 0,
        both=both or 0,
        store=store,
        model=model,
        engine=engine.value if engine else ("simulated" if running and running.engine == "simulated" else "vllm"),
        connector=connector.value if connector else "",
        host=host,
        port=port,
        routers=routers,
        collector_port=collector_port,
        nats_port=nats_port,
        nats_url=nats_url or os.environ.get("BATON_NATS_URL", ""),
        state_dir=str((state_dir or Path(common.state_dir)).expanduser().absolute()),
        kv_cache_bytes=size(kv_cache),
        engine_args=engine_args,
        insecure=insecure,
        entrance_decided=any(os.environ.get(name) for name in ENTRANCE_VARIABLES),
        keys_dir=keys_folder(state_dir, common) if secure else "",
        join=join,
        workers_min=workers_min,
        workers_max=workers_max,
    )
    from services.launcher.system.up import run_up  # here, so that `baton --help` is quick

    sys.exit(asyncio.run(run_up(options)))


@app.command()
def down(state_dir: StateDir = None) -> None:
    """End the system that `baton up` runs on another terminal: what runs may finish first."""
    folder = state_dir or Path(common_settings().state_dir)
    running = state_file.find(folder)
    if running is None:
        fail(f"No system runs with the state directory {folder}.")
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S_MAX
    while state_file.is_held(folder):
        if time.monotonic() > deadline:
            fail(f"The launcher (pid {running.pid}) is still there after {DOWN_S_MAX:.0f} s.")
        time.sleep(0.1)
    print(f"The system at {running.endpoint} has stopped.")


@app.command()
def workers(
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the fleet: every worker with its role, its phase and its load."""
    from services.launcher.views.fleet import fleet_table, read_fleet

    url = find_nats(nats_url, state_dir)
    try:
        fleet = asyncio.run(read_fleet(url))
    except BusError as error:
        no_nats(url, error)
    if json:
        print(msgspec.json.format(msgspec.json.encode(fleet.state)).decode())
    else:
        console = Console()
        console.print(fleet_table(fleet), width=console.width if console.is_terminal else WIDTH_OF_FILES)
        running = state_file.find(state_dir or Path(common_settings().state_dir))
        if running is not None and running.nats_url == url:
            for name, address in running.routers.items():
                console.print(f"{name} {address}", style="dim", highlight=False, soft_wrap=True)


order_commands.add_to(app)
plan_command.add_to(app)
view_commands.add_to(app)
doctor_command.add_to(app)
init_command.add_to(app)
key_commands.add_to(app)


@app.command(
    epilog="""[bold]Examples[/]

[cyan]baton explain[/]   the newest placement of the system that runs here

[cyan]baton explain router-3f2a91bc-d17[/]   as the header x-baton-decision of an answer names it

[cyan]baton explain --request my-request --url http://gpu-host:8000 --json[/]   of another system, for programs"""
)
def explain(
    decision: Annotated[str, typer.Argument(help="A decision's id, a request's id, or latest.")] = "latest",
    request: Annotated[str, typer.Option(help="The last decision for the request of this id.")] = "",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    url: Annotated[str, typer.Option(help="A router to ask; any of them knows what the others decided.")] = "",
    nats_url: Annotated[str, typer.Option(help="Ask over this NATS instead.")] = "",
    state_dir: StateDir = None,
) -> None:
    """Show why a request went where it went, what that was to cost, and how it turned out."""
    from services.launcher.views.decision_picture import draw
    from services.launcher.views.explain import NotExplained, ask_over_nats, ask_router, question_of

    question = question_of(decision, request)
    folder = state_dir or Path(common_settings().state_dir)
    try:
        if nats_url and not url:
            told = asyncio.run(ask_over_nats(nats_url, question))
        elif where := url or (running.endpoint if (running := state_file.find(folder)) else ""):
            told = asyncio.run(ask_router(where, question))
        else:
            fail(f"No system runs with the state directory {folder}. Name a router: --url http://HOST:8000")
    except NotExplained as error:
        fail(str(error))
    except BusError as error:
        no_nats(nats_url, error)
    if json:
        print(msgspec.json.format(msgspec.json.encode(in_full(told))).decode())
    else:
        draw(told, Console())


@app.command()
def health(
    service: Annotated[str, typer.Argument(help="router, orchestrator, collector or worker.")],
    instance: Annotated[str, typer.Argument(help="Which one, such as a worker id; none: any of them.")] = "",
    nats_url: NatsUrl = "",
    within_s: Annotated[float, typer.Option(help="How long to wait for a sign of life, seconds.")] = HEALTH_S,
) -> None:
    """Exit with 0 if a service says that it is ready, with 1 otherwise. For container health checks."""
    from services.launcher.views.health import hear_of

    url = find_nats(nats_url, None)
    try:
        status = asyncio.run(hear_of(url, service, instance, within_s))
    except BusError as error:
        no_nats(url, error)
    if status is None:
        fail(f"{service} {instance}".rstrip() + f" said nothing within {within_s:g} s")
    print(f"{status.service} {status.instance}: {status.phase.value} {status.detail}".rstrip())
    sys.exit(0 if status.phase is ServicePhase.READY else 1)


def size(text: str) -> int:
    """Bytes of an option; 0 when it is not given."""
    try:
        return parse_bytes(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-cache") from error


def main() -> None:
    """Console script."""
    logging.disable(logging.WARNING)  # What the user should know is on the screen; libraries need not repeat it.
    try:
        mount(app, sys.argv[1:])
        app()
    except KeyboardInterrupt:  # before the command listens for it
        sys.exit(130)


if __name__ == "__main__":
    main()
