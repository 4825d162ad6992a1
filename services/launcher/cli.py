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

import typer

from services.launcher.cluster.access import keys_for
from services.launcher.commands import doctor as doctor_command
from services.launcher.commands import init as init_command
from services.launcher.commands import keys as key_commands
from services.launcher.commands import orders as order_commands
from services.launcher.commands import views as view_commands
from services.launcher.commands.options import StateDir, common_settings, fail, keys_folder, parse_bytes
from services.launcher.commands.plugins import mount
from services.launcher.system import state_file
from services.launcher.system.machine import KEYS_VARIABLE
from services.launcher.system.plan import UpOptions

DOWN_S_MAX = 120.0
ROUTERS_MAX = 64
ACCESS_VARIABLES = (KEYS_VARIABLE, "ROUTER_KEYS", "ROUTER_INSECURE")
"""With one of these set, the user has decided about client access; routers validate the values."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve large language models with prefill and decode on separate vLLM engines.\n\n"
    "[cyan]baton up[/] starts a whole system on this machine: NATS, an OpenAI-compatible router, an orchestrator, "
    "a metrics collector with a web console, and workers with engines. The other commands show and operate it.",
    epilog="Start with [cyan]baton up[/] (or [cyan]baton up --engine simulated[/] without vLLM), then open a second "
    "terminal for [cyan]baton top[/]. [cyan]baton doctor[/] finds problems.",
)


class EngineKind(StrEnum):
    """Engines that workers can run."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class Connector(StrEnum):
    """KV connectors between vLLM engines."""

    BATON = "baton"
    UPSTREAM = "upstream"


Workers, Network, Engine, Scaling = "Workers", "Network", "Engine", "Scaling"
"""Groups of options in the help of `baton up`."""


@app.command(
    rich_help_panel="Run a system",
    epilog="""[bold]Examples[/]

[cyan]baton up[/]   one prefill and one decode worker with the built-in tiny model

[cyan]baton up --prefill 2 --decode 2 --model Qwen/Qwen3-0.6B[/]   a model from Hugging Face

[cyan]baton up --engine simulated[/]   no vLLM needed: for trying out clients and the console

[cyan]baton up --join --decode 1[/]   in a second terminal: add a worker to the running system

[cyan]baton up --store 1[/]   add a store worker, which keeps evicted KV in memory and in files (WORKER_STORE_*)

[cyan]baton up --routers 2[/]   two routers that share one port

[cyan]baton up --workers-max 4[/]   the planner runs up to four workers, as the traffic needs

[cyan]baton up --open[/]   NATS requires no keys: every user of this machine can read prompts and give orders

[cyan]baton up --engine-args "--max-num-seqs 64"[/]   any other vLLM argument

[bold]Environment[/]

Services read further settings from ROUTER_*, WORKER_*, COLLECTOR_* and ORCHESTRATOR_* variables.
BATON_OTLP_ENDPOINT turns on tracing.""",
)
def up(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Prefill workers.", show_default="1", rich_help_panel=Workers)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=0, help="Decode workers.", show_default="1", rich_help_panel=Workers)
    ] = None,
    both: Annotated[
        int | None, typer.Option(min=0, help="Aggregated workers.", show_default="0", rich_help_panel=Workers)
    ] = None,
    store: Annotated[
        int,
        typer.Option(min=0, help="Store workers: they keep KV in memory and in files.", rich_help_panel=Workers),
    ] = 0,
    join: Annotated[
        bool, typer.Option("--join", help="Add workers to a running system.", rich_help_panel=Workers)
    ] = False,
    model: Annotated[
        str, typer.Option(help="Hugging Face id or local path.", show_default="baton-tiny", rich_help_panel=Engine)
    ] = "",
    engine: Annotated[
        EngineKind | None, typer.Option(help="Engine of the workers.", show_default="vllm", rich_help_panel=Engine)
    ] = None,
    connector: Annotated[
        Connector | None,
        typer.Option(
            help="KV connector: Baton's, or vLLM's NixlConnector.", show_default="baton", rich_help_panel=Engine
        ),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(help="KV cache per worker, such as 512M or 8G.", show_default="vLLM's", rich_help_panel=Engine),
    ] = "",
    engine_args: Annotated[
        str, typer.Option(help="Further vLLM arguments, quoted.", show_default=False, rich_help_panel=Engine)
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=Network)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the OpenAI API.", rich_help_panel=Network)] = 8000,
    routers: Annotated[
        int, typer.Option(min=1, max=ROUTERS_MAX, help="Routers that share this port.", rich_help_panel=Network)
    ] = 1,
    collector_port: Annotated[
        int, typer.Option(help="Port of the console and the metrics.", rich_help_panel=Network)
    ] = 8001,
    nats_port: Annotated[int, typer.Option(help="Port of the NATS that is started.", rich_help_panel=Network)] = 4222,
    nats_url: Annotated[
        str,
        typer.Option(help="Use this running NATS instead.", show_default=False, rich_help_panel=Network),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Accept other machines without API keys.", rich_help_panel=Network),
    ] = False,
    open_nats: Annotated[
        bool,
        typer.Option(
            "--open", help="Start NATS without keys and TLS, open to all local users.", rich_help_panel=Network
        ),
    ] = False,
    workers_min: Annotated[
        int, typer.Option(min=1, help="Fewest workers that the planner leaves running.", rich_help_panel=Scaling)
    ] = 1,
    workers_max: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most workers; the planner may start and drain.",
            show_default="no scaling",
            rich_help_panel=Scaling,
        ),
    ] = 0,
    state_dir: StateDir = None,
) -> None:
    """Start a whole system on this machine and run it until Ctrl-C."""
    common = common_settings()
    running = state_file.find(state_dir or Path(common.state_dir)) if join else None
    if prefill is decode is both is None:
        prefill, decode, both = (0, 0, 0 if store else 1) if join else (1, 1, 0)
    nats_url, keys = nats_url or os.environ.get("BATON_NATS_URL", ""), keys_folder(state_dir, common)
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
        nats_url=nats_url,
        state_dir=str((state_dir or Path(common.state_dir)).expanduser().absolute()),
        kv_cache_bytes=size(kv_cache),
        engine_args=engine_args,
        insecure=insecure,
        access_configured=any(os.environ.get(name) for name in ACCESS_VARIABLES),
        keys_dir="" if open_nats else keys_for(nats_url, keys) if nats_url else keys,
        join=join,
        workers_min=workers_min,
        workers_max=workers_max,
    )
    from services.launcher.system.up import run_up  # Imported here so that `baton --help` is quick.

    sys.exit(asyncio.run(run_up(options)))


@app.command(rich_help_panel="Run a system")
def down(state_dir: StateDir = None) -> None:
    """Stop the system that `baton up` runs in another terminal. Running requests may finish."""
    folder = state_dir or Path(common_settings().state_dir)
    running = state_file.find(folder)
    if running is None:
        fail(f"No system runs with the state directory {folder}.")
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S_MAX
    while state_file.is_held(folder):
        if time.monotonic() > deadline:
            fail(f"The launcher (pid {running.pid}) has not stopped within {DOWN_S_MAX:.0f} s.")
        time.sleep(0.1)
    print(f"The system at {running.endpoint} has stopped.")


view_commands.add_to(app)
order_commands.add_to(app)
doctor_command.add_to(app)
init_command.add_to(app)
key_commands.add_to(app)


def size(text: str) -> int:
    """Bytes of an option; 0 when it is not given."""
    try:
        return parse_bytes(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-cache") from error


def main() -> None:
    """Console script."""
    logging.disable(logging.WARNING)  # Commands report on the screen; log lines of libraries would repeat it.
    try:
        mount(app, sys.argv[1:])
        app()
    except KeyboardInterrupt:  # before the command listens for it
        sys.exit(130)


if __name__ == "__main__":
    main()
