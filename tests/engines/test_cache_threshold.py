"""Requests of which too little is cached: refused by the engine before it computes anything, in the client's own format."""

from __future__ import annotations

import pytest

from shared.contracts.inference import LegKind
from tests.engines.test_handover import completion, prompt_of
from tests.engines.test_openai_surface import CHAT, TOOL, chat

pytestmark = pytest.mark.vllm

MOST = {"cache_hit_threshold": 0.9}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ASKED_IN = {
    "completion": (completion, {}),
    "completion with logprobs": (completion, {"logprobs": 2}),
    "several completions": (completion, {"n": 2, "temperature": 1.0}),
    "chat": (chat, {}),
    "chat with logprobs": (chat, {"logprobs": True}),
    "chat with tools": (chat, {"tools": [TOOL], "tool_choice": "auto"}),
    "chat with required tools": (chat, {"tools": [TOOL], "tool_choice": "required"}),
}


def path_of(make) -> dict[str, str]:
    return CHAT if make is chat else {}


def text_of(choice: dict) -> str | None:
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content")


@pytest.mark.parametrize("number", range(len(ASKED_IN)), ids=ASKED_IN.keys())
async def test_a_refused_request_is_an_answer_without_tokens(pair, router, number):
    make, more = list(ASKED_IN.values())[number]
    body = make(prompt_of(120, seed=300 + number), **more)

    answer = await router.leg(pair[1], LegKind.AGGREGATED, body, **path_of(make), **MOST)

    assert (answer.status, answer.failure) == (200, None), answer.body
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"cache_threshold"}
    for choice in answer.json()["choices"]:
        assert text_of(choice) in ("", None)
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert answer.json()["usage"]["prompt_tokens"] > 100
    assert (answer.report.finish_reason, answer.report.completion_tokens) == ("cache_threshold", 0)
    assert answer.report.kv.refused


@pytest.mark.parametrize("number", range(len(ASKED_IN)), ids=ASKED_IN.keys())
async def test_a_refused_stream_has_a_finish_reason_and_no_tokens(pair, router, number):
    make, more = list(ASKED_IN.values())[number]
    body = make(prompt_of(120, seed=320 + number), **more, **WITH_USAGE)

    answer = await router.leg(pair[1], LegKind.AGGREGATED, body, **path_of(make), **MOST)

    assert (answer.status, answer.failure) == (200, None), answer.body
    choices = [choice for event in answer.events() for choice in event["choices"]]
    assert {choice["finish_reason"] for choice in choices if choice["finish_reason"]} == {"cache_threshold"}
    assert {text_of(choice) for choice in choices} <= {"", None}
    assert answer.events()[-1]["usage"]["completion_tokens"] == 0
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.token_ids == []


SILENT = {
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 8},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 8},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SILENT)
async def test_where_an_answer_cannot_tell_of_a_refusal_the_report_does(pair, router, path, stream):
    text = prompt_of(120, seed=340 + stream + 2 * len(path))
    body = {"model": "baton-tiny", **SILENT[path](text), "stream": stream}

    refused = await router.leg(pair[1], LegKind.AGGREGATED, body, path=path, **MOST)
    served = await router.leg(pair[1], LegKind.AGGREGATED, body, path=path)

    assert (refused.report.finish_reason, refused.report.completion_tokens) == ("cache_threshold", 0)
    assert refused.report.kv.refused
    assert refused.token_ids == []
    assert (served.status, served.report.kv.refused, served.report.completion_tokens) == (200, False, 8)
