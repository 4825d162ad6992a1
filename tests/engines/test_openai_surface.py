"""Options of the OpenAI API work, or fail, on two engines as they do on one."""

from __future__ import annotations

import json

import pytest

from shared.contracts.engine_paths import CHAT_BATCH, FORMS, INVOCATIONS, PLACED, TOKENIZER_INFO
from shared.contracts.inference import LegKind
from tests.engines.test_handover import completion, prompt_of

pytestmark = pytest.mark.vllm

CHAT = {"path": "/v1/chat/completions"}
TOOL = {
    "type": "function",
    "function": {
        "name": "start_race",
        "description": "Fire the gun",
        "parameters": {"type": "object", "properties": {"lane": {"type": "integer"}}, "required": ["lane"]},
    },
}


def chat(content: str, **more) -> dict:
    messages = [{"role": "user", "content": content}]
    return {"model": "baton-tiny", "messages": messages, "max_tokens": 16, "temperature": 0, **more}


SAME_ON_BOTH = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop string that the first token holds": {"stop": ["a", "e", "i", "o"]},
    "minimum of tokens": {"min_tokens": 8},
    "json schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        }
    },
    "tools in the prompt": {"tools": [TOOL], "tool_choice": "none"},
    "required tools": {"tools": [TOOL], "tool_choice": "required"},
    "a named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "start_race"}}},
    "seeded sampling": {"temperature": 0.8, "seed": 11},
    "bad words": {"bad_words": ["the"]},
    "a cache salt": {"cache_salt": "tenant"},
    "truncated as fits": {"truncate_prompt_tokens": -1},
}


def without_ids(choices: list[dict]) -> list[dict]:
    """Tool calls have random ids."""
    for choice in choices:
        for call in choice["message"].get("tool_calls") or ():
            call["id"] = ""
    return choices


@pytest.mark.parametrize("more", SAME_ON_BOTH.values(), ids=SAME_ON_BOTH.keys())
async def test_chat_options_mean_the_same_on_two_engines_as_on_one(pair, router, more):
    prefill, decode = pair
    body = chat(prompt_of(80, seed=200 + list(SAME_ON_BOTH.values()).index(more)), **more)

    _first, second = await router.handed_over(prefill, decode, body, **CHAT)
    alone = await router.leg(prefill, LegKind.AGGREGATED, body, **CHAT)

    assert second.status == alone.status == 200, (second.body, alone.body)
    assert without_ids(second.json()["choices"]) == without_ids(alone.json()["choices"])
    assert second.report.received_tokens > 0


async def test_a_streamed_chat_ends_with_done(pair, router):
    prefill, decode = pair
    body = chat(prompt_of(60, seed=3), stream=True)

    _first, second = await router.handed_over(prefill, decode, body, **CHAT)

    assert second.body.endswith(b"data: [DONE]\n\n")
    assert second.events()[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1.0},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "n": 2},
    ],
    ids=str,
)
async def test_what_cannot_be_handed_over_is_computed_where_it_is_decoded(pair, router, more):
    prefill, decode = pair
    body = completion(prompt_of(70, seed=5), **more)

    first, second = await router.handed_over(prefill, decode, body)

    assert first.report.kv_transfer == b""
    assert first.report.prompt_tokens == 0
    assert second.status == 200, second.body
    assert second.report.received_tokens == 0


async def test_several_choices_come_from_one_engine(pair, router):
    _prefill, decode = pair

    answer = await router.leg(decode, LegKind.AGGREGATED, completion(prompt_of(50, seed=9), n=3, temperature=1.0))

    assert len(answer.json()["choices"]) == 3
    assert answer.report.completion_tokens == 72


async def test_conversations_in_one_body_are_answered_as_each_alone(pair, router):
    _prefill, decode = pair
    chats = [chat(f"conversation {number}") for number in range(3)]
    together = {**chats[0], "messages": [each["messages"] for each in chats]}

    alone = [(await router.leg(decode, LegKind.AGGREGATED, each, **CHAT)).json() for each in chats]
    answer = await router.leg(decode, LegKind.AGGREGATED, together, path=CHAT_BATCH)

    assert answer.status == 200, answer.body
    texts = [each["message"]["content"] for each in sorted(answer.json()["choices"], key=lambda each: each["index"])]
    assert texts == [each["choices"][0]["message"]["content"] for each in alone]
    assert answer.report.completion_tokens == sum(each["usage"]["completion_tokens"] for each in alone)
    assert answer.report.prompt_tokens == sum(each["usage"]["prompt_tokens"] for each in alone)


async def test_items_are_scored_by_what_the_model_would_generate(pair, router):
    _prefill, decode = pair
    body = {"model": "baton-tiny", "query": "Is it fast?", "items": ["a hare", "a snail"], "label_token_ids": [5, 6]}

    answer = await router.leg(decode, LegKind.AGGREGATED, body, path="/generative_scoring")

    assert answer.status == 200, answer.body
    assert len(answer.json()["data"]) == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (completion("x", model="nobody"), 404),
        (completion("x", max_tokens=-4), 400),
        (completion("x", max_tokens=1_000_000), 400),
        (completion("x", stream_options={"include_usage": True}), 400),
        (b"this is no JSON", 400),
        (b"[1, 2]", 400),
    ],
    ids=["unknown model", "negative", "too long", "options of no stream", "no JSON", "no object"],
)
async def test_a_bad_request_gets_vllms_error_from_the_prefill_engine(pair, router, body, status):
    prefill, _decode = pair

    answer = await router.leg(prefill, LegKind.PREFILL, body)

    assert answer.status == status
    assert "message" in json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations", "/tokenizer_info"]
)
async def test_what_the_models_engine_does_not_serve_is_refused_by_name(pair, router, path):
    prefill, _decode = pair

    answer = await router.leg(prefill, LegKind.AGGREGATED, {"model": "baton-tiny", "texts": ["x"]}, path=path)

    assert answer.status == 404
    assert path in json.loads(answer.body)["error"]["message"]


async def test_the_registry_has_the_paths_of_vllms_server(pair):
    served = set(pair[0].record.paths)

    assert {*PLACED, CHAT_BATCH, INVOCATIONS, "/generative_scoring", "/tokenize", "/detokenize"} <= served
    assert not served & {"/v1/embeddings", "/v2/embed", *FORMS, TOKENIZER_INFO}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", chat("an invocation")), ("/v1/completions", completion("an invocation", max_tokens=9))],
    ids=["chat", "completion"],
)
async def test_an_invocation_is_answered_as_the_endpoint_of_its_body(pair, router, path, body):
    _prefill, decode = pair

    plain = await router.leg(decode, LegKind.AGGREGATED, body, path=path)
    invoked = await router.leg(decode, LegKind.AGGREGATED, body, path=INVOCATIONS)

    assert invoked.status == plain.status == 200
    assert invoked.json()["choices"] == plain.json()["choices"]
    assert invoked.report.completion_tokens == plain.report.completion_tokens > 0


async def test_an_invocation_of_nothing_known_is_a_clear_error(pair, router):
    answer = await router.leg(pair[0], LegKind.AGGREGATED, {"model": "baton-tiny"}, path=INVOCATIONS)

    assert answer.status == 400
    assert "prompt" in json.loads(answer.body)["error"]["message"]


def test_prompts_without_a_salt_get_their_tenants():
    from services.worker.engines.vllm.client import salted

    tokens, of_client = {"type": "token", "prompt_token_ids": [1]}, {"type": "token", "cache_salt": "the client's"}

    assert salted(tokens, "t") == {**tokens, "cache_salt": "t"}
    assert salted(of_client, "t") == of_client
    assert salted(tokens, "") == tokens
    both = salted({"type": "enc_dec", "encoder_prompt": tokens, "decoder_prompt": tokens}, "t")
    assert both["decoder_prompt"]["cache_salt"] == "t"


async def test_other_paths_of_vllms_server_are_served(pair, router):
    prefill, _decode = pair

    answer = await router.leg(
        prefill, LegKind.AGGREGATED, {"model": "baton-tiny", "prompt": "one lap"}, path="/tokenize"
    )

    assert answer.json()["count"] == len(answer.json()["tokens"]) > 0


async def test_a_client_cannot_give_orders_to_the_kv_connector(pair, router):
    prefill, _decode = pair
    order = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r"}
    order |= {"remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1}

    answer = await router.leg(prefill, LegKind.AGGREGATED, completion(prompt_of(60, seed=13), kv_transfer_params=order))

    assert answer.status == 200
    assert answer.report.received_tokens == 0
