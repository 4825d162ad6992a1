"""The three APIs as clients speak them: bodies of requests, and what answers, whole or in events, tell."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.contracts.engine_paths import COMPLETIONS, MESSAGES, RESPONSES
from tests.nightly.chaos.outcomes import OK, Outcome
from tests.nightly.chaos.trace import Ask

DONE = "[DONE]"
CUT_OFF = "length"
"""The reason for which each answer ends, as completions name it."""
ENDS = {"max_tokens": CUT_OFF, "incomplete": CUT_OFF}
"""How messages and responses name it."""


def body_of(ask: Ask) -> dict[str, Any]:
    """What its client sends."""
    body: dict[str, Any] = {"model": ask.model, "ignore_eos": True, "stream": ask.stream}
    if ask.path == COMPLETIONS:
        return {**body, "prompt": ask.prompt, "max_tokens": ask.max_tokens}
    chat = [{"role": role, "content": text} for role, text in ask.prompt]  # type: ignore[misc]
    if ask.path == RESPONSES:
        return {**body, "input": chat, "max_output_tokens": ask.max_tokens}
    return {**body, "messages": chat, "max_tokens": ask.max_tokens}


def read_event(path: str, data: str, outcome: Outcome) -> None:
    """One event of a stream."""
    if outcome.dones:
        outcome.events_after_end += 1
    if data == DONE:
        outcome.dones += 1
        return
    event = msgspec.json.decode(data)
    if (error := _error_in(event)) is not None:
        outcome.code, outcome.message = str(error["code"]), str(error.get("message", ""))
    elif path == RESPONSES:
        _read_response_event(event, outcome)
    elif path == MESSAGES:
        _read_message_event(event, outcome)
    else:
        for choice in event["choices"]:
            outcome.text += choice["text"]
            if choice["finish_reason"] is not None:
                outcome.finishes.append(choice["finish_reason"])


def _error_in(event: dict[str, Any]) -> dict[str, Any] | None:
    """Responses have it in the event itself, or in the response that failed."""
    found: dict[str, Any] | None = event.get("error") or event.get("response", {}).get("error")
    return event if found is None and event.get("type") == "error" else found


def read_whole(path: str, raw: bytes, outcome: Outcome) -> None:
    """An answer, or an error, in one piece."""
    try:
        answer = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        outcome.code = f"no JSON: {raw[:80]!r}"
        return
    if outcome.status != OK:
        error = answer["error"]
        outcome.code, outcome.message = str(error["code"]), str(error.get("message", ""))
    elif path == RESPONSES:
        outcome.text += text_of(answer)
        outcome.finishes.append(_end(answer["status"]))
    elif path == MESSAGES:
        outcome.text += "".join(block["text"] for block in answer["content"])
        outcome.finishes.append(_end(answer["stop_reason"]))
    else:
        for choice in answer["choices"]:
            outcome.text += choice["text"]
            outcome.finishes.append(choice["finish_reason"])


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's items."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def _read_response_event(event: dict[str, Any], outcome: Outcome) -> None:
    """Its events are numbered, and the last one repeats all of them."""
    if event["sequence_number"] != outcome.events:
        outcome.disorder = f"event {event['sequence_number']} came as number {outcome.events}"
    outcome.events += 1
    if event["type"] == "response.output_text.delta":
        outcome.text += event["delta"]
    elif event["type"] == "response.completed":
        outcome.dones += 1
        outcome.finishes.append(_end(event["response"]["status"]))
        if text_of(event["response"]) != outcome.text:
            outcome.disorder = "the last event has another text than those before"


MESSAGE_EVENTS = {
    "message_start": ("",),
    "content_block_start": ("message_start",),
    "content_block_delta": ("content_block_start", "content_block_delta"),
    "content_block_stop": ("content_block_start", "content_block_delta"),
    "message_delta": ("content_block_stop",),
    "message_stop": ("message_delta",),
}
"""After which events each may come, in a message of one block."""


def _read_message_event(event: dict[str, Any], outcome: Outcome) -> None:
    kind = event["type"]
    if outcome.last_event not in MESSAGE_EVENTS.get(kind, ()):
        outcome.disorder = f"{kind} after {outcome.last_event or 'nothing'}"
    outcome.last_event = kind
    if kind == "content_block_delta":
        outcome.text += event["delta"]["text"]
    elif kind == "message_delta":
        outcome.finishes.append(_end(event["delta"]["stop_reason"]))
    elif kind == "message_stop":
        outcome.dones += 1


def _end(reason: str) -> str:
    return ENDS.get(reason, reason)
