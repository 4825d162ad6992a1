"""The options of `baton up` that belong to one model: those after a --model are that model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from services.launcher.system.options import ModelOptions, parse_bytes

ORDER = "services.launcher.options"
"""Of a context's ``meta``: the names of the options in the order in which they were typed."""
MODEL = "model"
REPEATED = ("aliases", "attach")
"""Options of which all values count; of others the last one."""
OF_EACH_MODEL = (
    MODEL, *REPEATED, "prefill", "decode", "both", "store", "attach_key_file", "connector", "kv_cache", "engine_args",
    "gpus_per_worker", "gpus_per_prefill", "gpus_per_decode", "workers_min", "workers_max", "sleep_after",
)  # fmt: skip
"""Options whose values `baton up` reads from the context, model by model."""
MODELS_MAX = 64


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
Both = Annotated[list[int] | None, option(MODEL_PANEL, "Aggregated workers.", "0", min=0, metavar="N")]
Store = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "Store workers: they keep KV in memory and in files.", "0", min=0, metavar="N"),
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
KvCache = Annotated[
    list[str] | None, option(MODEL_PANEL, "KV cache per worker, such as 512M or 8G.", "vLLM's", metavar="SIZE")
]
EngineArgs = Annotated[list[str] | None, option(MODEL_PANEL, "Further vLLM arguments, quoted.", False, metavar="TEXT")]
GpusPerWorker = Annotated[
    list[int] | None,
    option(MODEL_PANEL, "GPUs of each worker (tensor parallel); on a CPU: ranks.", "1", min=1, metavar="N"),
]
GpusPerPrefill = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for prefill workers.", "--gpus-per-worker", min=1, metavar="N")
]
GpusPerDecode = Annotated[
    list[int] | None, option(MODEL_PANEL, "The same for decode workers.", "--gpus-per-worker", min=1, metavar="N")
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
        values |= {"both": 0 if given.get("store") else 1} if join else {"prefill": 1, "decode": 1}
    other = {
        "attach_key_file": absolute(given.get("attach_key_file", "")),
        "kv_cache_bytes": size(given.get("kv_cache", "")),
        "sleep_after_s": given.get("sleep_after", 0.0),
    }
    return ModelOptions(**values | other)


def absolute(path: str) -> str:
    """Workers run in another folder."""
    return str(Path(path).expanduser().absolute()) if path else ""


def size(text: str) -> int:
    """Bytes of an option; 0 when it is not given."""
    try:
        return parse_bytes(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-cache") from error
