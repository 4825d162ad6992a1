"""Responses with state over real vLLM engines that keep none: the next turn is the whole conversation for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.engines.system.fleet import ANSWER_S_MAX, Fleet
from tests.support.system import until

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

MODEL = "baton-tiny"
LONG = "Who takes the baton when the last runner falls? " * 40
TOOL = {
    "type": "function",
    "name": "pass_baton",
    "description": "Pass the baton.",
    "parameters": {"type": "object", "properties": {"lane": {"type": "boolean"}}, "required": ["lane"]},
}


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[OpenAI]:
    url = f"{fleet.system.endpoint}/v1"
    with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=ANSWER_S_MAX) as client:
        yield client


def respond(client: OpenAI, given: Any, **fields: Any) -> Any:
    body = {"model": MODEL, "input": given, "max_output_tokens": 24, "temperature": 0, **fields}
    extra = {"ignore_eos": True, **body.pop("extra_body", {})}
    return client.responses.create(**body, extra_body=extra, extra_headers={"x-baton-mode": "disaggregated"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_turn_with_state_is_the_turn_with_its_history_and_is_cached(client: OpenAI, stream: bool):
    first = whole(respond(client, f"{LONG} {stream}", stream=stream))
    assert client.responses.retrieve(first.id).output_text == first.output_text

    def cached() -> Any:
        turn = whole(respond(client, "And then?", stream=stream, previous_response_id=first.id))
        return turn if turn.usage.input_tokens_details.cached_tokens >= 0.9 * first.usage.input_tokens else None

    second = until(cached, "the next turn is placed where its KV is", ANSWER_S_MAX)
    history = [
        {"role": "user", "content": f"{LONG} {stream}"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And then?"},
    ]
    alone = respond(client, history, store=False, extra_body={"cache_salt": f"alone {stream}"})

    assert second.previous_response_id == first.id
    assert second.output_text == alone.output_text != ""
    assert second.usage.input_tokens == alone.usage.input_tokens


def test_the_result_of_a_tool_continues_the_response_that_called_it(client: OpenAI):
    choice = {"type": "function", "name": TOOL["name"]}
    first = respond(client, "Pass it.", tools=[TOOL], tool_choice=choice, max_output_tokens=64)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dropped"}

    second = respond(client, [result], tools=[TOOL], previous_response_id=first.id)

    assert second.output
    assert second.usage.input_tokens > first.usage.input_tokens
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", *[item.type for item in first.output], "function_call_output"]


def whole(answer: Any) -> Any:
    """The response; of a stream, the one in its last event."""
    return answer if hasattr(answer, "output") else list(answer)[-1].response
