"""Bodies of /v1/responses as a simulated engine reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.worker.engines.simulated.requests import ApiError, messages_of, read_response


def read(**fields: Any) -> list[dict[str, Any]]:
    return messages_of(read_response(msgspec.json.encode({"model": "m", **fields})))


def test_items_become_the_messages_of_a_chat():
    part = {"type": "output_text", "text": "b"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]

    assert read(input="a", instructions="i") == [
        {"role": "system", "content": "i"}, {"role": "user", "content": "a"}
    ]  # fmt: skip
    assert [(one["role"], one["content"]) for one in read(input=items)] == [
        ("user", "a"), ("assistant", [part]), ("assistant", "{}"), ("tool", "d")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 400),
        ({"input": []}, 400),
        ({"input": 7}, 400),
        ({"input": [{"type": "image_generation_call"}]}, 400),
        ({"input": "a", "max_output_tokens": 0}, 400),
        ({"input": "a", "previous_response_id": "resp_1"}, 404),
    ],
)
def test_what_vllm_would_refuse_is_refused(fields: dict[str, Any], status: int):
    with pytest.raises(ApiError) as refused:
        read(**fields)
    assert refused.value.status == status
