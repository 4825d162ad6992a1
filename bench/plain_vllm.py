"""vLLM's own OpenAI server over the engine that a worker would start: ``python -m bench.plain_vllm --port 8001``.

It reads the worker's WORKER_* variables. Left out is what only Baton has: its KV connector and scheduler, KV events, and the details of each
step. The executor is the worker's, so that the same processes are compared, and the threads of a CPU engine are bound alike. With
WORKER_CONNECTOR=upstream the engine has vLLM's own KV connector, for a proxy that hands over between such servers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from services.worker.engines.vllm.arguments import arguments, prepare_import
from services.worker.settings import TINY_MODEL, Settings
from services.worker.tiny_model import ensure_tiny_model
from shared.runtime.settings import load, load_common

CONNECTOR, EVENTS = "--kv-transfer-config", "--kv-events-config"
FLAGS_OF_BATON = ("--enable-logging-iteration-details",)


def plain_arguments(settings: Settings, model: str, *, on_cpu: bool = True) -> list[str]:
    """The worker's arguments for vLLM without what only Baton needs."""
    typed, plain = iter(arguments(settings, model, on_cpu=on_cpu, events=("", ""), otlp_endpoint="")), []
    left_out = (EVENTS,) if settings.connector == "upstream" else (CONNECTOR, EVENTS)
    for word in typed:
        if word in left_out:
            next(typed)
        elif word not in FLAGS_OF_BATON:
            plain.append(word)
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    settings = load(Settings, "WORKER_")
    is_tiny = settings.model == TINY_MODEL
    model = str(ensure_tiny_model(Path(load_common().cache_dir))) if is_tiny else settings.model
    prepare_import(kv_host=settings.kv_address, model_is_local=True, rank_host="127.0.0.1")

    import uvloop
    import vllm.v1.engine.async_llm  # noqa: F401  # loads OpenMP before it would read the engine's variables
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from services.worker.engines.vllm.cli_args import make_arg_parser, validate_parsed_serve_args
    from services.worker.engines.vllm.engine import _inspect_models_here, _threads

    on_cpu = current_platform.is_cpu()
    cli_env_setup()
    if on_cpu:
        _inspect_models_here()
    served = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [*plain_arguments(settings, model, on_cpu=on_cpu), *served]
    )
    validate_parsed_serve_args(args)
    with _threads(settings):
        uvloop.run(run_server(args))


if __name__ == "__main__":  # vLLM's child process imports this module too.
    main()
