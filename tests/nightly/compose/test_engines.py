"""`docker compose up`, with nothing else said, serves with real engines in containers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.nightly.compose.conftest import Compose, running, wait_until_ready

pytestmark = pytest.mark.compose

UP_S_MAX = 3000
"""With the build of an image with vLLM, and the start of two engines, on two busy cores."""
REQUEST_S_MAX = 300.0
PROMPT = "Once upon a time there was a relay race. " * 20
"""Several KV blocks, so that there is something to hand over."""


@pytest.fixture(scope="module")
def system(docker: dict[str, str]) -> Iterator[Compose]:
    """Without a profile and without `.env`."""
    with running(docker, "") as compose:
        compose.run("up", "--detach", "--wait", timeout=UP_S_MAX)
        wait_until_ready(compose)
        yield compose


def complete(system: Compose, model: str = "baton-tiny", **headers: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return httpx.post(f"{system.endpoint}/v1/completions", json=body, headers=headers, timeout=REQUEST_S_MAX)


def test_one_prefill_and_one_decode_engine_hand_over_kv_and_answer_as_one_engine(system: Compose):
    together = complete(system, **{"x-baton-mode": "disaggregated"})
    alone = complete(system, **{"x-baton-mode": "aggregated"})
    fleet = json.loads(system.run("run", "--rm", "-T", "baton", "workers", "--json"))

    assert together.status_code == 200, together.text
    assert together.headers["x-baton-mode"] == "disaggregated"
    assert together.headers["x-baton-handoff"] in {"streamed", "offered"}
    workers = [together.headers[f"x-baton-{role}-worker"] for role in ("prefill", "decode")]
    assert workers == ["prefill-1", "decode-1"]
    assert alone.headers["x-baton-mode"] == "aggregated"
    assert together.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert [worker["record"]["engine"] for worker in fleet["workers"]] == ["vllm", "vllm"]


def test_each_engine_computes_on_half_of_the_cores(system: Compose):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only")
    looked = (
        "import os; from baton_serve.services.worker.engines.vllm.arguments import parse_cores;"
        "print(parse_cores(os.environ['WORKER_CPU_CORES']))"
    )

    parts = [json.loads(system.run("exec", "-T", name, "python", "-c", looked)) for name in ("prefill", "decode")]

    assert sorted(parts[0] + parts[1]) == cores
    assert parts[0]
    assert parts[1]


def test_what_an_operator_sets_reaches_engines_that_run(system: Compose, tmp_path: Path):
    """A folder with a model, adapters, variables of UCX, and the limit of locked memory."""
    tmp_path.chmod(0o755)
    container = system.run("ps", "--quiet", "prefill").strip()
    cached = system.run("exec", "-T", "prefill", "sh", "-c", "ls -d /home/baton/.cache/baton/*/config.json").split()
    (folder,) = {str(Path(each).parent) for each in cached}
    system.docker("cp", f"{container}:{folder}", str(tmp_path / "own"))
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path)], check=True)
    (tmp_path / "adapters").mkdir(mode=0o755)
    libraries = tmp_path / "libraries.env"
    libraries.write_text("UCX_LOG_LEVEL=error\n")
    given = {
        "MODELS_FOLDER": str(tmp_path),
        "MODEL": "/models/own",
        "SERVED_MODEL_NAME": "own",
        "WORKER_ALIASES": "chat",
        "LORA_FOLDER": str(tmp_path / "adapters"),
        "ENGINE_ENV_FILE": str(libraries),
        "ENGINE_MEMLOCK": "1048576",
        "ROUTER_SLOS": '{"default": {"ttft_s": 100}}',
    }

    system.run("up", "--detach", "--wait", timeout=UP_S_MAX, **given)
    wait_until_ready(system)

    answer = complete(system, model="chat", **{"x-baton-mode": "disaggregated"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "own"
    for name in ("prefill", "decode"):
        seen = system.run(
            "exec", "-T", name, "sh", "-c", "echo $UCX_LOG_LEVEL $WORKER_LORA_DIR; ulimit -l; ls -d /adapters/."
        )
        assert seen.split() == ["error", "/adapters", "1024", "/adapters/."]
        assert system.attempt("exec", "-T", name, "touch", "/models/written").returncode != 0
    assert system.run("exec", "-T", "router", "printenv", "ROUTER_SLOS").strip() == given["ROUTER_SLOS"]
