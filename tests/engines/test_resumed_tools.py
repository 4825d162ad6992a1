"""Streams with thoughts and tool calls, cut behind any piece: vLLM's own parsers continue with the same state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.worker.tiny_model import EOS_ID
from tests.engines.front import Front, Pieces, front, model_with_marks

pytestmark = pytest.mark.vllm

CREATED = 1_234_567_890
"""Long before any event of the second half."""
TOGETHER = frozenset({2, 3, 9, 17, 18, 19, 30, 31, 44})
"""Tokens that a busy server hears of together with the one before."""


@dataclass(frozen=True)
class Case:
    """What an engine says, and what vLLM is to find in it."""

    engine_args: str
    answer: str
    content: str
    reasoning: str = ""
    marks: bool = True
    """Whether what the parsers look for are tokens of their own."""


CALLS = {0: ("weather", {"city": "Zürich", "days": 3}), 1: ("clock", {"zone": "CET"})}
HERMES = (
    'Let me look. <tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
)
QWEN = (
    "<think>\nWhere is it?\n</think>\n\nLet me look.\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n"
    "<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>"
)
CASES = {
    "hermes, spelled": Case("--tool-call-parser hermes", HERMES, "Let me look. ", marks=False),
    "thoughts, hermes": Case(
        "--tool-call-parser hermes --reasoning-parser deepseek_r1",
        f"<think>Where is it?</think>{HERMES}",
        "Let me look. ",
        "Where is it?",
    ),
    "thoughts, qwen3": Case(
        "--tool-call-parser qwen3_coder --reasoning-parser qwen3", QWEN, "\n\nLet me look.\n\n", "\nWhere is it?\n"
    ),
    "llama3": Case(
        "--tool-call-parser llama3_json",
        '{"name": "weather", "parameters": {"city": "Zürich", "days": 3}}; '
        '{"name": "clock", "parameters": {"zone": "CET"}}',
        "",
    ),
    "pythonic": Case("--tool-call-parser pythonic", "[weather(city='Zürich', days=3), clock(zone='CET')]", ""),
}
TYPES = {"city": "string", "zone": "string", "days": "integer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {one: {"type": TYPES[one]} for one in arguments}},
        },
    }
    for name, arguments in CALLS.values()
]
BODY = {"messages": [{"role": "user", "content": "What is the weather?"}], "tools": TOOLS, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with_marks(tmp_path_factory.mktemp("front"))


def tokens_of(model, case: Case) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    if case.marks:
        return [*tokenizer.encode(case.answer, add_special_tokens=False).ids, EOS_ID]
    parts = case.answer.replace("<", "\0<").split("\0")  # No mark is in one part, so none is found.
    halves = [half for part in parts for half in (part[:1], part[1:]) if half]
    return [*(one for half in halves for one in tokenizer.encode(half, add_special_tokens=False).ids), EOS_ID]


def events_of(pieces: list[bytes]) -> list[dict[str, Any]]:
    parts = b"".join(pieces).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def settled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without their date, and with each call's own id in the place of the one that was drawn for it."""
    for event in events:
        del event["created"]
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                if call.get("id"):
                    call["id"] = f"of call {call['index']}"
    return events


def summary_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of them."""
    summary: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "ends": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            summary["content"] += delta.get("content") or ""
            summary["reasoning"] += delta.get("reasoning") or ""
            summary["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in delta.get("tool_calls") or ():
                name, arguments = summary["calls"].get(call["index"], ("", ""))
                said = call.get("function") or {}
                summary["calls"][call["index"]] = (
                    name or said.get("name") or "",
                    arguments + (said.get("arguments") or ""),
                )
    return summary


async def goes_on(there: Front, whole: Pieces, cut: int) -> None:
    relayed = whole.relayed(cut)

    rest, record = await there.serve(BODY, relayed, CREATED)

    assert {event["created"] for event in events_of(rest.data_of)} == {CREATED}
    both = settled(events_of([*whole.data_of[:cut], *rest.data_of]))
    assert both == settled(events_of(whole.data_of)), f"cut behind piece {cut}"
    assert relayed[0] + rest.relayed(len(rest.tokens_of))[0] == there.core.answer
    assert record.completion_tokens == len(there.core.answer)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_cut_behind_any_piece_calls_and_thoughts_go_on_event_by_event(model, case):
    async with front(model, f"--enable-auto-tool-choice {case.engine_args}", tokens_of(model, case)) as there:
        whole, _record = await there.serve(BODY)
        summary = summary_of(events_of(whole.data_of))
        assert {index: (name, json.loads(said)) for index, (name, said) in summary["calls"].items()} == CALLS
        assert (summary["content"], summary["reasoning"], summary["ends"]) == (
            case.content,
            case.reasoning,
            ["tool_calls"],
        )
        details = events_of(whole.data_of)[-1]["usage"].get("completion_tokens_details") or {}
        assert (details.get("reasoning_tokens", 0) > 0) == bool(case.reasoning)
        for cut in range(1, len(whole.data_of)):
            await goes_on(there, whole, cut)

        # What a parser says of tokens that come together it may not say of the same ones alone.
        there.core.joined = TOGETHER
        whole, _record = await there.serve(BODY)
        assert any(whole.joined_of)
        for cut in range(1, len(whole.data_of), 2):
            await goes_on(there, whole, cut)
