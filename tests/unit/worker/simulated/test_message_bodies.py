"""Bodies of /v1/messages as a simulated engine reads them, and its answers as Anthropic's SDK reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.worker.engines.simulated.core.batch import LENGTH, STOP
from services.worker.engines.simulated.requests import ApiError, chat_of, read_message
from services.worker.engines.simulated.responses import Choice, Inbox, MessageObjects, usage_of

QUESTION = [{"role": "user", "content": "a"}]


def read(**fields: Any) -> list[dict[str, Any]]:
    return chat_of(read_message(msgspec.json.encode({"model": "m", "max_tokens": 4, **fields})))


def test_blocks_become_the_messages_of_a_chat():
    said = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
    ]
    told = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "d"}]}]
    messages = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": told}]

    assert read(messages=messages, system=[{"type": "text", "text": "s"}]) == [
        {"role": "system", "content": "s"},
        *QUESTION,
        {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}]},
        {"role": "tool", "content": "d"},
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": []},
        {"messages": QUESTION, "max_tokens": None},
        {"messages": QUESTION, "max_tokens": 0},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ],
)
def test_what_vllm_would_refuse_is_refused(fields: dict[str, Any]):
    with pytest.raises(ApiError) as refused:
        read(**fields)
    assert refused.value.status == 400
    assert msgspec.json.decode(refused.value.anthropic_body)["type"] == "error"


@pytest.mark.parametrize(
    ("finish", "stop", "told"),
    [(LENGTH, None, "max_tokens"), (STOP, None, "end_turn"), (STOP, "x", "stop_sequence"), (STOP, 7, "end_turn")],
)
def test_a_whole_message_says_why_it_ended_and_what_it_used(finish: str, stop: str | int | None, told: str):
    from anthropic.types import Message  # Two seconds in each of xdist's processes.

    choice = Choice(index=0, prompt=[], inbox=Inbox(), finish_reason=finish, stop_reason=stop)
    whole = MessageObjects("m", "a", 9).whole([choice], [" yes"], [], usage_of(9, 3, 4))

    message = Message.model_validate(whole, strict=True)
    assert (message.id, message.content[0].text, message.stop_reason) == ("msg_a", " yes", told)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (5, 4, 3)
