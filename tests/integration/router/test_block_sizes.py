"""One router serves models whose engines have blocks of different sizes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from shared.contracts.decisions import DecisionRecord
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import service_process
from tests.support.simulated_system import until_ready
from tests.support.system import until

pytestmark = pytest.mark.nats

SIZES = {"small": 16, "large": 128}
PATIENCE_S = 120.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 40


def served(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]}


def ask(url: str, model: str) -> tuple[int, DecisionRecord]:
    """The prompt's tokens, and the decision when it is complete."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert reply.status_code == 200, reply.text
    found = httpx.get(f"{url}/baton/decisions/{reply.headers['x-baton-decision']}", trust_env=False)
    return reply.json()["usage"]["prompt_tokens"], msgspec.json.decode(found.content, type=DecisionRecord)


def test_each_models_blocks_are_found_in_its_own_size(tmp_path: Path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with NatsServer(tmp_path, has_buckets=True) as server:
        common = {"BATON_NATS_URL": server.url}
        with ExitStack() as processes:
            processes.enter_context(service_process("router", tmp_path, ROUTER_PORT=str(port), **common))
            for model, size in SIZES.items():
                for number in range(2):  # A prompt is tokenized only where there is a choice.
                    settings = {
                        "WORKER_ENGINE": "simulated",
                        "WORKER_WORKER_ID": f"{model}-{number}",
                        "WORKER_SERVED_MODEL_NAME": model,
                        "WORKER_BLOCK_SIZE": str(size),
                    }
                    processes.enter_context(service_process("worker", tmp_path, **common, **settings))
            until_ready(f"{url}/ready")
            until(lambda: served(url) == set(SIZES), "both models are served", PATIENCE_S)
            for model, size in SIZES.items():

                def whole_blocks_are_predicted(model: str = model, size: int = size) -> bool:
                    tokens, decision = ask(url, model)
                    whole = (tokens - 1) // size * size
                    return decision.predicted_cached_tokens == decision.cached_tokens == whole

                until(whole_blocks_are_predicted, f"the router knows what {model} has cached", PATIENCE_S)
