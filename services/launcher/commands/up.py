"""``baton up``: starts a whole system, or adds workers to a running one."""

from __future__ import annotations

import asyncio
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from services.launcher.cluster.access import keys_for
from services.launcher.commands.options import StateDir, common_settings, keys_folder, parse_bytes
from services.launcher.system import state_file
from services.launcher.system.machine import KEYS_VARIABLE
from services.launcher.system.plan import UpOptions

ROUTERS_MAX = 64
ACCESS_VARIABLES = (KEYS_VARIABLE, "ROUTER_KEYS", "ROUTER_INSECURE")
"""With one of these set, the user has decided about client access; routers validate the values."""


class EngineKind(StrEnum):
    """Engines that workers can run."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class ConnectorKind(StrEnum):
    """KV connectors between vLLM engines."""

    BATON = "baton"
    UPSTREAM = "upstream"


def _option(group: str, help_text: str, default: str | bool = True, *names: str, **limits: Any) -> Any:
    """An option in a group of the help. ``default``: what the help shows as its default."""
    return typer.Option(*names, help=help_text, show_default=default, rich_help_panel=group, **limits)


Prefill = Annotated[int | None, _option("Workers", "Prefill workers.", "1", min=0)]
Decode = Annotated[int | None, _option("Workers", "Decode workers.", "1", min=0)]
Both = Annotated[int | None, _option("Workers", "Aggregated workers.", "0", min=0)]
Store = Annotated[int, _option("Workers", "Store workers: they keep KV in memory and in files.", min=0)]
Join = Annotated[bool, _option("Workers", "Add workers to a running system.", True, "--join")]
Model = Annotated[str, _option("Engine", "Hugging Face id or local path.", "baton-tiny")]
Engine = Annotated[EngineKind | None, _option("Engine", "Engine of the workers.", "vllm")]
Connector = Annotated[
    ConnectorKind | None, _option("Engine", "KV connector: Baton's, or vLLM's NixlConnector.", "baton")
]
KvCache = Annotated[str, _option("Engine", "KV cache per worker, such as 512M or 8G.", "vLLM's")]
EngineArgs = Annotated[str, _option("Engine", "Further vLLM arguments, quoted.", False)]
Host = Annotated[str, _option("Network", "Address to listen on.")]
Port = Annotated[int, _option("Network", "Port of the OpenAI API.")]
Routers = Annotated[int, _option("Network", "Routers that share this port.", min=1, max=ROUTERS_MAX)]
CollectorHost = Annotated[str, _option("Network", "Address of the console and the metrics.")]
CollectorPort = Annotated[int, _option("Network", "Port of the console and the metrics.")]
NatsPort = Annotated[int, _option("Network", "Port of the NATS that is started.")]
RunningNats = Annotated[str, _option("Network", "Use this running NATS instead.", False)]
Insecure = Annotated[bool, _option("Network", "Accept other machines without API keys.", True, "--insecure")]
OpenNats = Annotated[
    bool, _option("Network", "Start NATS without keys and TLS, open to all local users.", True, "--open")
]
WorkersMin = Annotated[int, _option("Scaling", "Fewest workers that the planner leaves running.", min=1)]
WorkersMax = Annotated[int, _option("Scaling", "Most workers; the planner may start and drain.", "no scaling", min=0)]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
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
    )(up)


def up(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    prefill: Prefill = None,
    decode: Decode = None,
    both: Both = None,
    store: Store = 0,
    join: Join = False,
    model: Model = "",
    engine: Engine = None,
    connector: Connector = None,
    kv_cache: KvCache = "",
    engine_args: EngineArgs = "",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    routers: Routers = 1,
    collector_host: CollectorHost = "127.0.0.1",
    collector_port: CollectorPort = 8001,
    nats_port: NatsPort = 4222,
    nats_url: RunningNats = "",
    insecure: Insecure = False,
    open_nats: OpenNats = False,
    workers_min: WorkersMin = 1,
    workers_max: WorkersMax = 0,
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
        collector_host=collector_host,
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


def size(text: str) -> int:
    """Bytes of an option; 0 when it is not given."""
    try:
        return parse_bytes(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-cache") from error
