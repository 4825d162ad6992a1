"""``baton up``: starts a whole system, or adds workers to a running one.

Some options belong to one model: those after a --model are that model's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from services.launcher.bus_client import keys_for
from services.launcher.commands.options import StateDir, fail, keys_folder, state_folder
from services.launcher.system import state_file
from services.launcher.system.devices import engines_for
from services.launcher.system.machine import KEYS_VARIABLE, describe_machine
from services.launcher.system.options import ModelOptions, UpOptions, parse_bytes
from services.launcher.system.process_plan import PlanRefused

ORDER = "services.launcher.options"
"""Key of a context's ``meta``: the names of the options in the order in which they were typed."""
MODEL = "model"
REPEATED = ("aliases", "attach")
"""Options of which all values count; of the others the last one does."""
OF_EACH_MODEL = (
    MODEL, *REPEATED, "prefill", "decode", "both", "host_memory", "object_store", "store", "attach_key_file",
    "connector", "kv_backend", "kv_cache", "engine_args", "gpus_per_worker", "gpus_per_prefill", "gpus_per_decode",
    "pipeline", "pipeline_prefill", "pipeline_decode", "data_parallel", "data_parallel_prefill",
    "data_parallel_decode", "workers_min", "workers_max", "sleep_after",
)  # fmt: skip
"""Options whose values `baton up` reads from the context, model by model."""
MODELS_MAX = 64
AUTO = "auto"
"""The number of workers that this machine serves most with; see ``devices.engines_for``."""


class ConnectorKind(StrEnum):
    """KV connectors between vLLM engines."""

    BATON = "baton"
    UPSTREAM = "upstream"


def option(group: str, help_text: str, default: str | bool = True, *names: str, **limits: Any) -> Any:
    """An option in a group of the help. ``default``: what the help shows as its default."""
    return typer.Option(*names, help=help_text, show_default=default, rich_help_panel=group, **limits)


MODEL_PANEL = "Of each model: once, or after each --model"
Model = Annotated[list[str] | None, option(MODEL_PANEL, "Hugging Face id or local path.", "baton-tiny", metavar="ID")]
Alias = Annotated[
    list[str] | None,
    option(MODEL_PANEL, "A further name in requests; may be repeated.", False, "--alias", metavar="NAME"),
]
Prefill = Annotated[list[int] | None, option(MODEL_PANEL, "Prefill workers.", "1", min=0, metavar="N")]
Decode = Annotated[list[int] | None, option(MODEL_PANEL, "Decode workers.", "1", min=0, metavar="N")]


def workers(text: str) -> int | str:
    """The value of --both. Raises typer.BadParameter."""
    if text == AUTO or text.isdecimal():
        return text if text == AUTO else int(text)
    raise typer.BadParameter(f"{text!r} is neither a number nor {AUTO}")


Both = Annotated[
    list[str] | None,
    option(
        MODEL_PANEL,
        "Aggregated workers; auto: as many as this machine serves most with.",
        "0",
        metavar="N|auto",
        parser=workers,
    ),
]
Store = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "Store workers: they keep KV in memory and in files.", "0", min=0, metavar="N"),
]
HostMemory = Annotated[
    list[str] | None,
    option(
        MODEL_PANEL,
        "Memory of this host for KV that engines evict, such as 64G: starts a store of that size.",
        False,
        metavar="SIZE",
    ),
]
ObjectStore = Annotated[
    list[str] | None,
    option(
        MODEL_PANEL, "Bucket for KV below a store's files, http(s)://host/bucket: starts a store.", False, metavar="URL"
    ),
]
Attach = Annotated[
    list[str] | None,
    option(
        MODEL_PANEL,
        "A worker for this OpenAI-compatible server, and for its MODEL; may be repeated.",
        False,
        metavar="URL[=MODEL]",
    ),
]
AttachKeyFile = Annotated[
    list[str] | None, option(MODEL_PANEL, "File with the API key for these servers.", False, metavar="FILE")
]
Connector = Annotated[
    list[ConnectorKind] | None, option(MODEL_PANEL, "KV connector: Baton's, or vLLM's NixlConnector.", "baton")
]
KvBackend = Annotated[
    list[str] | None, option(MODEL_PANEL, "NIXL's plug-in that moves KV, such as LIBFABRIC.", "UCX", metavar="NAME")
]
KvCache = Annotated[
    list[str] | None, option(MODEL_PANEL, "KV cache per worker, such as 512M or 8G.", "vLLM's", metavar="SIZE")
]
EngineArgs = Annotated[list[str] | None, option(MODEL_PANEL, "Further vLLM arguments, quoted.", False, metavar="TEXT")]
GpusPerWorker = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "GPUs of each worker; on a CPU: ranks.", "one for each stage", min=1, metavar="N"),
]
GpusPerPrefill = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for prefill workers.", "--gpus-per-worker", min=1, metavar="N")
]
GpusPerDecode = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for decode workers.", "--gpus-per-worker", min=1, metavar="N")
]
Pipeline = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "Pipeline stages of each worker, which share out its GPUs.", "1", min=1, metavar="N"),
]
PipelinePrefill = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for prefill workers.", "--pipeline", min=1, metavar="N")
]
PipelineDecode = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for decode workers.", "--pipeline", min=1, metavar="N")
]
DataParallel = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "Workers of each data parallel group, for models with experts.", "1", min=1, metavar="N"),
]
DataParallelPrefill = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for prefill workers.", "--data-parallel", min=1, metavar="N")
]
DataParallelDecode = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for decode workers.", "--data-parallel", min=1, metavar="N")
]
WorkersMin = Annotated[
    list[int] | None, option(MODEL_PANEL, "Fewest workers that the planner leaves.", "1", min=1, metavar="N")
]
WorkersMax = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "Most workers; the planner may start and drain.", "no scaling", min=0, metavar="N"),
]


SleepAfter = Annotated[
    list[float] | None,
    option(
        MODEL_PANEL, "Sleep after so long without a request; a request wakes it.", "never", min=1, metavar="SECONDS"
    ),
]


class UpCommand(TyperCommand):
    """Keeps the order of the options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        _values, _rest, order = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


def by_model(order: Sequence[str], given: Mapping[str, Sequence[Any] | None]) -> list[dict[str, Any]]:
    """The options of each model, by name. Options before the first --model are for all models that do not set them.

    ``order``: all options as typed; ``given``: the values of those that belong to a model, in their order.
    """
    unread = {name: iter(values or ()) for name, values in given.items()}
    for_all: dict[str, Any] = {}
    models: list[dict[str, Any]] = []
    for name in order:
        if name in unread:
            value = next(unread[name])
            if name == MODEL:
                models.append({MODEL: value})
                continue
            own = models[-1] if models else for_all
            own[name] = (*own.get(name, ()), value) if name in REPEATED else value
    return [{**for_all, **one} for one in models or [{}]]


def model_options(given: Mapping[str, Any], *, join: bool) -> ModelOptions:
    """With the defaults for the number of workers."""
    values = {name: value for name, value in given.items() if name in ModelOptions.__struct_fields__}
    if not (given.keys() & {"prefill", "decode", "both", "attach"}):
        values |= (
            {"both": 0 if any(map(given.get, ("store", "host_memory", "object_store"))) else 1}
            if join
            else {"prefill": 1, "decode": 1}
        )
    if given.get("host_memory") or given.get("object_store"):
        values["store"] = given.get("store") or 1
    other = {
        "attach_key_file": absolute(given.get("attach_key_file", "")),
        "kv_cache_bytes": size(given.get("kv_cache", ""), "--kv-cache"),
        "host_memory_bytes": size(given.get("host_memory", ""), "--host-memory"),
        "sleep_after_s": given.get("sleep_after", 0.0),
    }
    return ModelOptions(**values | other)


def absolute(path: str) -> str:
    """Workers run in another folder."""
    return str(Path(path).expanduser().absolute()) if path else ""


def size(text: str, of_option: str) -> int:
    """Bytes of an option; 0 when it is not given."""
    try:
        return parse_bytes(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=of_option) from error


ROUTERS_MAX = 64
PORTS = {"min": 1, "max": 65535, "metavar": "PORT"}
ACCESS_VARIABLES = (KEYS_VARIABLE, "ROUTER_KEYS", "ROUTER_INSECURE")
"""If one of these is set, the user has decided about client access; routers validate the values."""
OF_ONE_MODEL = ("WORKER_SERVED_MODEL_NAME", "WORKER_ALIASES", "WORKER_REVISION")
"""Settings that workers of different models cannot share."""


class EngineKind(StrEnum):
    """Engines that workers can run."""

    VLLM = "vllm"
    SIMULATED = "simulated"


Join = Annotated[bool, option("Workers", "Add workers to a running system.", True, "--join")]
AwakeMax = Annotated[
    int, option("Workers", "Models that may be awake at a time; the others sleep.", "all", min=0, metavar="N")
]
KeepTrying = Annotated[
    bool, option("Workers", "Start a worker that fails again, while the others serve.", True, "--keep-trying")
]
Engine = Annotated[EngineKind | None, option("Workers", "Engine of the workers.", "vllm")]
Host = Annotated[str, option("Network", "Address to listen on.")]
Port = Annotated[int, option("Network", "Port of the OpenAI API.", **PORTS)]
Routers = Annotated[int, option("Network", "Routers that share this port.", min=1, max=ROUTERS_MAX)]
CollectorHost = Annotated[str, option("Network", "Address of the console and the metrics.")]
CollectorPort = Annotated[int, option("Network", "Port of the console and the metrics.", **PORTS)]
NatsHost = Annotated[
    str, option("Network", "Address of the NATS that is started, for workers on other hosts.", metavar="ADDRESS")
]
NatsPort = Annotated[int, option("Network", "Port of the NATS that is started.", **PORTS)]
RunningNats = Annotated[str, option("Network", "Use this running NATS instead.", False)]
Insecure = Annotated[bool, option("Network", "Accept other machines without API keys.", True, "--insecure")]
OpenNats = Annotated[
    bool, option("Network", "Start NATS without keys and TLS, open to all local users.", True, "--open")
]
Config = Annotated[
    Path | None,
    option("Several hosts", "Run one host of this fleet; instead of other options.", False, metavar="FLEET.TOML"),
]
Name = Annotated[str, option("Several hosts", "The host in the fleet file.", "this machine's name", metavar="HOST")]
Address = Annotated[
    str, option("Several hosts", "Where other hosts reach the head host.", "that of the file", metavar="ADDRESS")
]
WITH_CONFIG = {"config", "name", "address", "keep_trying", "state_dir"}
"""Options that `baton up --config` takes."""
EPILOG = """[bold]Examples[/]

[cyan]baton up[/]   one prefill and one decode worker with the built-in tiny model

[cyan]baton up --prefill 2 --decode 2 --model Qwen/Qwen3-0.6B[/]   a model from Hugging Face

[cyan]baton up --model A --prefill 1 --decode 1 --model B --both 1[/]   two models, each with its own workers

[cyan]baton up --awake-max 1 --model A --both 1 --model B --both 1[/]   one at a time, on the whole machine

[cyan]baton up --host-memory 64G[/]   keep KV that engines evict, in memory and in files

[cyan]baton up --engine simulated[/]   no vLLM needed: for trying out clients and the console

[cyan]baton up --attach http://127.0.0.1:30000=qwen[/]   a worker for a server that runs already

[cyan]baton up --join --decode 1[/]   in a second terminal: add a worker to the running system

[cyan]baton up --config fleet.toml --name gpu-1[/]   one host of a fleet; see docs/operating.md

[cyan]baton up --gpus-per-prefill 1 --gpus-per-decode 2[/]   tensor parallel decode workers

[cyan]baton up --gpus-per-worker 4 --pipeline-decode 2[/]   decode workers of two stages, each with two GPUs

[cyan]baton up --model MODEL --data-parallel-decode 4[/]   a decode group of four workers, which share out the experts

[cyan]baton up --workers-max 4[/]   the planner runs up to four workers, as the traffic needs

[cyan]baton up --engine-args "--max-num-seqs 64"[/]   any other vLLM argument

[bold]Environment[/]

Services read further settings from ROUTER_*, WORKER_*, COLLECTOR_* and ORCHESTRATOR_* variables.
BATON_OTLP_ENDPOINT turns on tracing."""


def add_to(app: typer.Typer) -> None:
    app.command(cls=UpCommand, rich_help_panel="Run a system", epilog=EPILOG)(up)


def up(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared; see OF_EACH_MODEL
    ctx: typer.Context,
    model: Model = None,
    aliases: Alias = None,
    prefill: Prefill = None,
    decode: Decode = None,
    both: Both = None,
    host_memory: HostMemory = None,
    object_store: ObjectStore = None,
    store: Store = None,
    attach: Attach = None,
    attach_key_file: AttachKeyFile = None,
    connector: Connector = None,
    kv_backend: KvBackend = None,
    kv_cache: KvCache = None,
    engine_args: EngineArgs = None,
    gpus_per_worker: GpusPerWorker = None,
    gpus_per_prefill: GpusPerPrefill = None,
    gpus_per_decode: GpusPerDecode = None,
    pipeline: Pipeline = None,
    pipeline_prefill: PipelinePrefill = None,
    pipeline_decode: PipelineDecode = None,
    data_parallel: DataParallel = None,
    data_parallel_prefill: DataParallelPrefill = None,
    data_parallel_decode: DataParallelDecode = None,
    workers_min: WorkersMin = None,
    workers_max: WorkersMax = None,
    sleep_after: SleepAfter = None,
    awake_max: AwakeMax = 0,
    engine: Engine = None,
    join: Join = False,
    keep_trying: KeepTrying = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    routers: Routers = 1,
    collector_host: CollectorHost = "127.0.0.1",
    collector_port: CollectorPort = 8001,
    nats_host: NatsHost = "127.0.0.1",
    nats_port: NatsPort = 4222,
    nats_url: RunningNats = "",
    insecure: Insecure = False,
    open_nats: OpenNats = False,
    config: Config = None,
    name: Name = "",
    address: Address = "",
    state_dir: StateDir = None,
) -> None:
    """Start a whole system on this machine and run it until Ctrl-C."""
    folder = state_folder(state_dir)
    if config or name or address:
        up_host(ctx, config, folder)
    running = state_file.find(folder) if join else None
    nats_url, keys = nats_url or os.environ.get("BATON_NATS_URL", ""), keys_folder(state_dir)
    same = {name: value for name, value in ctx.params.items() if name in UpOptions.__struct_fields__}
    other = {
        "models": models_of(ctx, join=join),
        "engine": engine.value if engine else ("simulated" if running and running.engine == "simulated" else "vllm"),
        "nats_url": nats_url,
        "state_dir": str(folder),
        "access_configured": any(os.environ.get(name) for name in ACCESS_VARIABLES),
        "keys_dir": "" if open_nats else keys_for(nats_url, keys) if nats_url else keys,
    }
    run(UpOptions(**same | other))


def run(options: UpOptions) -> NoReturn:
    """Run the system until it ends."""
    from services.launcher.system.launch import run_up  # Imported here so that `baton --help` is quick.

    sys.exit(asyncio.run(run_up(options)))


def up_host(ctx: typer.Context, config: Path | None, state_dir: Path) -> NoReturn:
    """Run one host of a fleet file."""
    name, address, keep_trying = (ctx.params[each] for each in ("name", "address", "keep_trying"))
    if not config:
        option = "--name" if name else "--address"
        fail(f"{option} is of a host of a fleet file: give the file with --config.")
    if others := [each for each in ctx.meta[ORDER] if each not in WITH_CONFIG]:
        fail(f"--{others[0].replace('_', '-')} has no effect with --config: write it into {config}.")
    from services.launcher.commands.fleet import run_host  # Imported here so that `baton --help` is quick.

    sys.exit(run_host(config, name, address, state_dir, keep_trying=keep_trying))


def models_of(ctx: typer.Context, *, join: bool) -> tuple[ModelOptions, ...]:
    """The models with their workers. Exits when a variable would give several models one name."""
    given = {name: values for name, values in ctx.params.items() if name in OF_EACH_MODEL}
    typed = by_model(ctx.meta[ORDER], given)
    alone = len(typed) == 1 and not join
    models = [model_options(with_counts(each, alone=alone), join=join) for each in typed]
    if len(models) > MODELS_MAX:
        fail(f"{len(models)} models were given; at most {MODELS_MAX} can be served.")
    if len(models) > 1 and (names := [name for name in OF_ONE_MODEL if os.environ.get(name)]):
        fail(f"{names[0]} is set, but holds for every worker, and there are {len(models)} models: unset it.")
    return tuple(models)


def with_counts(given: Mapping[str, Any], *, alone: bool) -> Mapping[str, Any]:
    """The options of a model with a number for --both auto. ``alone``: it is the only one of a new system. Exits where
    others have a say in the number.
    """
    if given.get("both") != AUTO:
        return given
    if not alone or given.keys() & {"prefill", "decode"}:
        fail("--both auto is for one model that has the machine to itself: give numbers of workers.")
    try:
        here = describe_machine()
    except PlanRefused as refused:
        fail(str(refused))
    ranks = max(given.get("gpus_per_worker", 1), given.get("pipeline", 1)) * given.get("data_parallel", 1)
    return {**given, "both": engines_for(here, ranks)}
