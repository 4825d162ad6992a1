"""Prompts rendered for routers, with media and of all endpoints: they are what the engine is given for the same request.

The server, renderer, processor and hashes are vLLM's; only the engine behind them is missing (see ``front``). The model
is a tiny BLIP-2, whose image stands before all text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.legs.asgi_call import ask_app
from services.worker.legs.body import salted
from services.worker.prompt_handlers import AT_ONCE_MAX, WAITING_MAX, RenderHandler
from services.worker.tiny_model import EOS_ID
from shared.bus.port import Envelope
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RENDERED_BODY_BYTES_MAX, RenderedPrompt, RenderPrompt
from shared.contracts.kv_events import block_hash64, unpack_hashes
from shared.contracts.workers import HashScheme
from tests.engines.front import BLOCK, CHAT, MODEL, Front, front, model_with_images
from tests.engines.test_media import BLUE, RED, workers_environment
from tests.support.memory_bus import MemoryBus, MemoryHub

pytestmark = pytest.mark.vllm
__all__ = ("workers_environment",)

ANSWER = [20, 21, 22, EOS_ID]
TOOLS = "--enable-auto-tool-choice --tool-call-parser pythonic"
IMAGE_TOKENS = 8
LONG = {"type": "text", "text": "what is it that we see here " * 20}
NAMED = {"type": "image_url", "image_url": {"url": RED}, "uuid": "logo"}


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict, **fields: object) -> bytes:
    return json.dumps(
        {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": [*parts]}], **fields}
    ).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_with_images(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def server(model: Path) -> AsyncIterator[Front]:
    async with front(model, TOOLS, ANSWER) as served:
        yield served


def handler(server: Front) -> RenderHandler:
    """Patient with a machine that has other work."""
    from services.worker.engines.vllm.tokenizer import VllmRenderer

    renderer = VllmRenderer(server.app, server.scheme)
    return RenderHandler(renderer, WorkerId("w1"), Epoch(1), MemoryBus(MemoryHub()), s_max=120.0)


async def rendered(
    server: Front, body: bytes, *, path: str = CHAT, salt: str = "", media_salt: str = ""
) -> RenderedPrompt:
    ask = RenderPrompt(worker_id=WorkerId("w1"), path=path, body=body, cache_salt=salt, media_salt=media_salt)
    return await handler(server).render(ask, Envelope({}, len(body)))


async def computed(server: Front, body: bytes, *, path: str = CHAT, salt: str = "", media_salt: str = "") -> object:
    """The request that the engine is given for a leg."""
    CURRENT_LEG.set(Leg(LegInput(request_id="q", cache_salt=salt, media_salt=media_salt or salt)))
    server.core.prompt_tokens, server.core.asked = 0, []
    status, answer = await ask_app(server.app, path, salted(body, salt))
    assert status == 200, answer
    (request,) = server.core.asked
    return request


async def test_a_prompt_is_hashed_by_the_engines_hash_blocks(model):
    async with front(model, TOOLS, ANSWER, hash_block_size=BLOCK // 2) as server:
        found = await rendered(server, chat(LONG))

    assert found.refusal == ""
    assert len(unpack_hashes(found.hashes)) == found.tokens // (BLOCK // 2) >= 2


async def test_a_rendered_prompt_has_the_blocks_of_the_engines(server):
    from services.worker.engines.vllm.tokenizer import hashes_of

    for part, salt in itertools.product((image(RED), NAMED), ("", "a" * 64)):
        body = chat(part, LONG, stream=True)

        found = await rendered(server, body, salt=salt)
        request = await computed(server, body, salt=salt)

        assert found.refusal == ""
        assert found.tokens == len(request.prompt_token_ids)
        assert [*unpack_hashes(found.hashes)] == [*map(block_hash64, hashes_of(request, server.scheme))]
        assert len(unpack_hashes(found.hashes)) == found.tokens // server.scheme.block_size >= 2
        assert found.media_end == IMAGE_TOKENS


CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": json.dumps({"at": "the finish"})}
TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
MESSAGE = {
    "system": "You run.",
    "messages": [
        {"role": "user", "content": LONG["text"]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "the finish"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "red"}]},
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": TOOL["parameters"]}],
}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
RESPONSE = {
    "instructions": "You run.",
    "input": [
        {"role": "user", "content": LONG["text"]},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "red"},
        {"role": "user", "content": [{"type": "input_text", "text": "Who wins?"}]},
    ],
    "tools": [{"type": "function", **TOOL}],
}


async def test_every_conversation_is_rendered_as_the_engine_gets_them(server):
    from services.worker.engines.vllm.tokenizer import hashes_of

    endpoints = {
        "/v1/messages": {**MESSAGE, "max_tokens": 2},
        "/v1/responses": {**RESPONSE, "max_output_tokens": 2},
        CHAT: {"messages": [{"role": "user", "content": LONG["text"]}], "tools": CHAT_TOOLS, "max_tokens": 2},
    }
    for (path, fields), stream, salt in itertools.product(endpoints.items(), (False, True), ("", "a" * 64)):
        body = json.dumps({"model": MODEL, "stream": stream, **fields}).encode()

        found = await rendered(server, body, path=path, salt=salt)
        request = await computed(server, body, path=path, salt=salt)

        assert found.refusal == ""
        assert found.tokens == len(request.prompt_token_ids)
        assert [*unpack_hashes(found.hashes)] == [*map(block_hash64, hashes_of(request, server.scheme))]
        assert len(unpack_hashes(found.hashes)) >= 2
        assert request.cache_salt == (salt or None)


async def test_responses_of_which_the_server_makes_more_are_not_rendered(server):
    kept = ({"background": True}, {"previous_response_id": "resp_1"})
    for fields in (*kept, {"tools": [{"type": "web_search_preview"}]}, {"tools": "x"}):
        body = json.dumps({"model": MODEL, "input": LONG["text"], **fields}).encode()

        assert (await rendered(server, body, path="/v1/responses")).refusal
    assert server.core.asked == []


async def test_the_engine_gets_a_medium_that_was_only_rendered_before(server):
    """vLLM's server does not send media again that it believes its engine to have."""
    body = chat(image(RED), LONG)
    assert not (await rendered(server, body)).refusal
    assert server.core.asked == []

    first = await computed(server, body)

    assert [feature.data is not None for feature in first.mm_features] == [True]


async def test_blocks_tell_pictures_and_tenants_apart(server):
    ways = [(RED, ""), (BLUE, ""), (RED, "a" * 64), (RED, "b" * 64), (RED, "a" * 64)]

    found = [(await rendered(server, chat(image(url), LONG), salt=salt)).hashes for url, salt in ways]

    assert len(set(found)) == 4
    assert found[2] == found[4]
    # Tenants with a public cache: only the names that their clients give are salted.
    named = [(await rendered(server, chat(NAMED, LONG), media_salt=salt)).hashes for salt in ("a" * 64, "b" * 64)]
    assert len({*found, *named}) == 6


async def test_workers_with_the_model_in_different_folders_name_media_alike(server, model, tmp_path):
    body = chat(image(RED), LONG)
    async with front(Path(shutil.copytree(model, tmp_path / "elsewhere")), "", ANSWER) as other:
        elsewhere = await rendered(other, body)

    assert elsewhere.hashes == (await rendered(server, body)).hashes != b""


async def test_text_before_a_medium_shares_its_prefix():
    """Of any model whose media stand where the client put them, which BLIP-2's do not."""

    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from services.worker.engines.vllm.tokenizer import prompt_of

    def prompt(*names: str) -> object:
        features = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=40 + 20 * at, length=16), name)
            for at, name in enumerate(names)
        ]
        request = EngineCoreRequest(
            request_id="q",
            prompt_token_ids=[*range(100)],
            mm_features=features,
            sampling_params=SamplingParams(),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return prompt_of(request, HashScheme(block_size=16))

    text, red, blue, both = prompt(), prompt("red"), prompt("blue"), prompt("red", "blue")

    assert text.hashes[:2] == red.hashes[:2] == blue.hashes[:2]
    assert len({text.hashes[2], red.hashes[2], blue.hashes[2]}) == 3
    assert (text.media_end, red.media_end, both.media_end) == (0, 56, 76)
    assert red.hashes[:3] == both.hashes[:3]


HOSTILE = [
    (chat(*[image(RED)] * 50), "400"),
    (chat(image("data:image/png;base64,AAAA")), "400"),
    (chat(image("data:image/png;base64,not base64!")), "400"),
    (chat(image("http://127.0.0.1:1/x.png")), "BATON_MEDIA_DOMAINS"),
    (chat(image(RED), model="another"), "404"),
    (b"{", "400"),
    (b"[" * 100_000, "400"),
    (b"[" * 300_000, "objects, arrays and fields"),
    (b" " * (RENDERED_BODY_BYTES_MAX + 1), "larger"),
]


async def test_hostile_bodies_are_refused(server):
    for body, why in HOSTILE:
        found = await rendered(server, body)

        assert (found.tokens, found.hashes) == (0, b"")
        assert why in found.refusal, (body[:100], found)
        assert server.core.asked == []
    assert (await rendered(server, chat(image(RED)), path="/v1/embeddings")).refusal == "nothing to render"
    assert not (await rendered(server, chat(image(RED), LONG))).refusal


async def test_nothing_runs_on_after_a_prompt_is_rendered(server, caplog):
    before = asyncio.all_tasks()

    for stream in (False, True, False, True):
        assert not (await rendered(server, chat(image(RED), LONG, stream=stream))).refusal

    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"] == []


async def test_asks_at_once_are_bounded(server):
    handling, envelope = handler(server), Envelope({}, 0)
    ask = RenderPrompt(worker_id=WorkerId("w1"), path=CHAT, body=chat(image(RED), LONG))

    found = await asyncio.gather(*(handling.render(ask, envelope) for _ in range(AT_ONCE_MAX + WAITING_MAX + 3)))

    refused = [one.refusal for one in found if one.refusal]
    assert len([why for why in refused if "too many" in why]) == 3


async def test_a_stream_with_a_medium_resumes_with_it(server):
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [image(RED), LONG]}]}
    whole, _ = await server.serve(body)
    prompt = len(server.core.asked[0].prompt_token_ids)

    rest, result = await server.serve(body, resume=(ANSWER[:2], frozenset()))

    assert result.cannot_resume == ""
    request = server.core.asked[-1]
    assert request.prompt_token_ids[prompt:] == ANSWER[:2]
    assert [feature.identifier for feature in request.mm_features] == [
        feature.identifier for feature in server.core.asked[0].mm_features
    ]
    assert [token for tokens in rest.tokens_of for token in tokens] == ANSWER[2:]
    assert [token for tokens in whole.tokens_of for token in tokens] == ANSWER
