"""Texts that would make vLLM's server panic, wait or answer for minutes, on every path that tokenizes.

The server, renderer and tokenizer are vLLM's; only the engine behind them is missing (see ``front``). Text is split as
for Llama 3.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.legs.asgi_call import ask_app
from services.worker.tiny_model import CL100K, CONTEXT_TOKENS, _config, ensure_tiny_tokenizer
from shared.contracts.request_body import TOKENS_ANSWERED_MIN
from tests.engines.front import MODEL, Front, front
from tests.engines.test_media import workers_environment

pytestmark = pytest.mark.vllm
__all__ = ("workers_environment",)

SPACES = " " * 11_000_000
UNDIVIDED = "a" * 30_000_000
TEXT_PATHS = {
    "/tokenize": lambda text: {"prompt": text},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/messages": lambda text: {"max_tokens": 1, "messages": [{"role": "user", "content": text}]},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = folder / "model"
    shutil.copytree(ensure_tiny_tokenizer(folder, CL100K), made)
    (made / "config.json").write_text(json.dumps(_config(4096)))
    return made


@pytest.fixture
async def server(model: Path) -> AsyncIterator[Front]:
    async with front(model, "", [20, 1], max_model_len=CONTEXT_TOKENS) as served:
        yield served


async def ask(server: Front, path: str, **fields: object) -> tuple[int, bytes]:
    return await ask_app(server.app, path, json.dumps({"model": MODEL, **fields}).encode())


@pytest.mark.parametrize("path", TEXT_PATHS)
@pytest.mark.parametrize("text", [SPACES, UNDIVIDED], ids=["spaces", "undivided"])
async def test_a_text_too_long_to_tokenize_is_refused_on_every_path_before_that(server, path, text):
    begun = time.monotonic()
    status, answer = await ask(server, path, **TEXT_PATHS[path](text))

    assert status == 400, answer[:500]
    assert len(answer) < 10_000
    assert time.monotonic() - begun < 10.0
    assert (await ask(server, "/tokenize", prompt="hello"))[0] == 200


async def test_an_answer_of_too_many_tokens_is_refused_before_it_is_made(server):
    status, answer = await ask(server, "/tokenize", prompt="\U0001f642 " * (TOKENS_ANSWERED_MIN // 2))

    assert status == 400
    assert b"more than %d tokens" % TOKENS_ANSWERED_MIN in answer


async def test_the_event_loop_is_free_while_the_longest_text_is_tokenized(server):
    """So the worker's heartbeat, which runs on it, does not stop: it counts as lost after three seconds."""
    longest, stop = 0.0, False

    async def beat() -> None:
        nonlocal longest
        while not stop:
            begun = time.monotonic()
            await asyncio.sleep(0.05)
            longest = max(longest, time.monotonic() - begun)

    beating = asyncio.create_task(beat())
    statuses = [
        (await ask(server, "/tokenize", prompt=text))[0] for text in ("a" * 500_000, SPACES[:500_000], UNDIVIDED)
    ]
    stop = True
    await beating

    assert statuses[2] == 400
    assert longest < 1.5


async def test_a_panic_of_the_tokenizers_library_fails_its_request_alone(server, monkeypatch):
    """Should a text within the bounds make it panic."""
    from services.worker.engines.vllm import text_bounds

    monkeypatch.setattr(text_bounds, "_check", lambda *_: None)
    panicked, answer = await ask(server, "/tokenize", prompt=SPACES)
    status, _ = await ask(server, "/tokenize", prompt="hello")

    assert (panicked, status) == (400, 200)
    assert b"cannot read this text" in answer
