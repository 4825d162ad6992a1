"""Streams of messages and responses, cut behind any piece: the events of both halves are those of one that was never
cut, with the ids, indices and numbers that the SDKs check.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.engines.front import MODEL, Front, Pieces, front, model_with_marks
from tests.engines.test_resumed_tools import CALLS, CASES, CREATED, TOGETHER, TOOLS, Case, tokens_of

pytestmark = pytest.mark.vllm

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ANSWER_ID = "a" * 32
PLAIN = Case(
    "",
    "Läufer, 走れ! 🏃 The next runner takes the baton.",
    "Läufer, 走れ! 🏃 The next runner takes the baton.",
    marks=False,
)
QUESTION = [{"role": "user", "content": "What is the weather?"}]
FUNCTIONS = [tool["function"] for tool in TOOLS]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "max_tokens": 1100,
        "messages": QUESTION,
        "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
    },
    RESPONSES: {
        "max_output_tokens": 200,
        "input": QUESTION,
        "tools": [{"type": "function", **one} for one in FUNCTIONS],
    },
}
DRAWN = re.compile(r'"(signature|id)":"(?!chatcmpl-q")[^"]*"')
"""Of a message: what is drawn anew on each engine, and told only once."""
event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with_marks(tmp_path_factory.mktemp("front"))


def events_of(pieces: list[bytes]) -> list[dict[str, Any]]:
    """Each has its type as its name, too."""
    parts = b"".join(pieces).decode().split("\n\n")
    assert parts[-1] == ""
    events = []
    for part in parts[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def settled(path: str, pieces: list[bytes]) -> list[dict[str, Any]]:
    if path == RESPONSES:
        return events_of(pieces)
    return events_of([DRAWN.sub(r'"\1":""', b"".join(pieces).decode()).encode()])


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a message's events, in the order in which they may come."""
    assert [event["type"] for event in events if event["type"].startswith("message")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["type"] == "message_start"
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(blocks), False)
            blocks.append(
                {"type": event["content_block"]["type"], "text": "", "name": event["content_block"].get("name")}
            )
        else:
            assert (event["index"], is_open) == (len(blocks) - 1, True)
        is_open = event["type"] != "content_block_stop"
        delta = event.get("delta", {})
        said = [delta.get(name) for name in ("text", "thinking", "partial_json")]
        blocks[-1]["text"] += next((one for one in said if one), "")
    assert not is_open
    end = events[-2]
    return {"blocks": blocks, "stop_reason": end["delta"]["stop_reason"], "usage": end["usage"]}


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that its events tell of, which the last one repeats."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    types = [event["type"] for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert (types.count("response.created"), types.index("response.completed")) == (1, len(types) - 1)
    told = [event_type.validate_python(event) for event in events]
    completed = events[-1]["response"]
    assert completed["id"] == events[0]["response"]["id"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in completed["output"]] == [item["id"] for item in items] == added
    assert len({*added}) == len(added)
    texts = dict.fromkeys(added, "")
    for event in told:
        if event.type.endswith(".delta"):
            texts[event.item_id] += event.delta
    assert all(texts[item["id"]] == text_of(item) for item in completed["output"])
    return completed


def text_of(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def check(path: str, case: Case, events: list[dict[str, Any]], tokens: int) -> None:
    """The whole stream says what the engine said."""
    if path == MESSAGES:
        message = message_of(events)
        blocks = message["blocks"]
        assert message["usage"]["output_tokens"] == tokens
        assert message["stop_reason"] == ("tool_use" if case is not PLAIN else "end_turn")
        calls = [(block["name"], json.loads(block["text"])) for block in blocks if block["type"] == "tool_use"]
        texts = {kind: "".join(one["text"] for one in blocks if one["type"] == kind) for kind in ("text", "thinking")}
    else:
        response = response_of(events)
        output = response["output"]
        assert response["usage"]["output_tokens"] == tokens
        calls = [(one["name"], json.loads(one["arguments"])) for one in output if one["type"] == "function_call"]
        kinds = {"text": "message", "thinking": "reasoning"}
        texts = {name: "".join(text_of(one) for one in output if one["type"] == kind) for name, kind in kinds.items()}
    assert calls == ([*CALLS.values()] if case is not PLAIN else [])
    assert texts == {"text": case.content, "thinking": case.reasoning}


def body_of(path: str, case: Case) -> dict[str, Any]:
    body = {name: value for name, value in BODIES[path].items() if case is not PLAIN or name != "tools"}
    if path == MESSAGES and case.reasoning:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    return body


async def goes_on(there: Front, path: str, case: Case, whole: Pieces, cut: int) -> None:
    relayed = whole.relayed(cut)

    rest, record = await there.serve(body_of(path, case), relayed, CREATED, path=path, answer_id=ANSWER_ID)

    assert relayed[0] + rest.relayed(len(rest.tokens_of))[0] == there.core.answer
    assert record.completion_tokens == len(there.core.answer)
    both = b"".join([*whole.data_of[:cut], *rest.data_of])
    undated = re.sub(rb'"created_at":\d+', b'"created_at":0', both)
    uncut = re.sub(rb'"created_at":\d+', b'"created_at":0', b"".join(whole.data_of))
    assert settled(path, [undated]) == settled(path, [uncut]), f"cut behind piece {cut}"
    if path == RESPONSES:
        assert events_of(rest.data_of)[-1]["response"]["created_at"] == CREATED


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("case", [PLAIN, CASES["thoughts, qwen3"], CASES["thoughts, hermes"], CASES["pythonic"]])
async def test_cut_behind_any_piece_a_stream_goes_on_event_by_event(model, case, path):
    tools = f"--enable-auto-tool-choice {case.engine_args}" if case.engine_args else ""
    async with front(model, tools, tokens_of(model, case)) as there:
        for joined in (frozenset[int](), TOGETHER):
            # What a parser says of tokens that come together it may not say of the same ones alone.
            there.core.joined = joined
            whole, _record = await there.serve(body_of(path, case), path=path, answer_id=ANSWER_ID)
            check(path, case, events_of(whole.data_of), len(there.core.answer))
            for cut in range(1, len(whole.data_of), 1 + len(joined) % 2):
                await goes_on(there, path, case, whole, cut)


def client_of(sdk: Any, stream: bytes) -> Any:
    """A client whose every request is answered with this stream."""
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    transport = httpx2.MockTransport(lambda _request: answer)
    return sdk(api_key="k", base_url="http://baton", max_retries=0, http_client=httpx2.Client(transport=transport))


async def cut_in_the_middle(model: Path, case: Case, path: str) -> bytes:
    async with front(model, f"--enable-auto-tool-choice {case.engine_args}", tokens_of(model, case)) as there:
        body = body_of(path, case)
        whole, _record = await there.serve(body, path=path, answer_id=ANSWER_ID)
        cut = len(whole.data_of) // 2
        rest, _record = await there.serve(body, whole.relayed(cut), CREATED, path=path, answer_id=ANSWER_ID)
        return b"".join([*whole.data_of[:cut], *rest.data_of])


async def test_anthropics_client_reads_a_message_that_was_cut(model):
    case = CASES["thoughts, qwen3"]
    stream = await cut_in_the_middle(model, case, MESSAGES)

    from anthropic import Anthropic  # Two seconds in each of xdist's processes.

    with client_of(Anthropic, stream).messages.stream(model=MODEL, **body_of(MESSAGES, case)) as reading:
        message = reading.get_final_message()

    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert calls == [*CALLS.values()]
    assert "".join(block.text for block in message.content if block.type == "text") == case.content
    assert [block.thinking for block in message.content if block.type == "thinking"] == [case.reasoning]
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", len(tokens_of(model, case)))


async def test_openais_client_reads_a_response_that_was_cut(model):
    case = CASES["thoughts, qwen3"]
    stream = await cut_in_the_middle(model, case, RESPONSES)

    with client_of(openai.OpenAI, stream).responses.stream(model=MODEL, **body_of(RESPONSES, case)) as reading:
        response = reading.get_final_response()

    calls = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
    assert calls == [*CALLS.values()]
    assert response.output_text == case.content
    assert response.usage.output_tokens == len(tokens_of(model, case))


async def test_ids_of_a_response_are_its_own(model):
    body = body_of(RESPONSES, PLAIN)
    async with front(model, "", tokens_of(model, PLAIN)) as there:
        answers = [
            events_of((await there.serve(body, path=RESPONSES, answer_id=name))[0].data_of)[-1]["response"]
            for name in (ANSWER_ID, "b" * 32, "", "")
        ]

    assert len({answer["id"] for answer in answers}) == len({answer["output"][0]["id"] for answer in answers}) == 4
