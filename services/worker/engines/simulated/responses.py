"""Response bytes of the two OpenAI endpoints, whole and streamed, with vLLM's additional fields."""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

import msgspec

from services.worker.engines.simulated.choices import Choice

DONE = b"data: [DONE]\n\n"
JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_PLACE = "\x00"
_PLACE_JSON = b'"\\u0000"'

encode = msgspec.json.encode


class Responses(Protocol):
    """Encodes the response to one request."""

    def opening(self, index: int) -> bytes:
        """The first event of a choice's stream, or b""."""

    def chunk(self, index: int, text: str, ending: Ending) -> bytes:
        """One event of a stream."""

    def whole(
        self, choices: list[Choice], texts: list[str], logprobs: list[Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The response without streaming."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The stream's event with the usage."""


class Ending(msgspec.Struct, frozen=True):
    """Fields of an event besides the text."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


UNFINISHED = Ending()


def split_chunk(responses: Responses, index: int) -> tuple[bytes, bytes]:
    """The bytes before and after the text's JSON in an event, so that plain events need no encoding."""
    before, _, after = responses.chunk(index, _PLACE, UNFINISHED).partition(_PLACE_JSON)
    return before, after


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


class CompletionResponses:
    """/v1/completions."""

    def __init__(self, model: str, request_id: str) -> None:
        self._head = {
            "id": f"cmpl-{request_id or uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self, _index: int) -> bytes:
        """b"": the stream begins with text."""
        return b""

    def chunk(self, index: int, text: str, ending: Ending) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": ending.logprobs,
            "finish_reason": ending.finish_reason,
            "stop_reason": ending.stop_reason,
        }
        rest = {} if ending.usage is None else {"usage": ending.usage}
        return _event({**self._head, "choices": [choice], **rest})

    def whole(
        self, choices: list[Choice], texts: list[str], logprobs: list[Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        made = [
            {
                "index": choice.index,
                "text": text,
                "logprobs": logprob,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice, text, logprob in zip(choices, texts, logprobs, strict=True)
        ]
        return {**self._head, "choices": made, "usage": usage}

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice."""
        return _event({**self._head, "choices": [], "usage": usage})


class ChatResponses:
    """/v1/chat/completions."""

    def __init__(self, model: str, request_id: str) -> None:
        self._id = f"chatcmpl-{request_id or uuid.uuid4().hex}"
        self._rest = {"created": int(time.time()), "model": model}
        self._head = {"id": self._id, "object": "chat.completion.chunk", **self._rest}

    def opening(self, index: int) -> bytes:
        """An event with the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return _event({**self._head, "choices": [choice]})

    def chunk(self, index: int, text: str, ending: Ending) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": text},
            "logprobs": ending.logprobs,
            "finish_reason": ending.finish_reason,
        }
        if ending.finish_reason is not None:
            choice["stop_reason"] = ending.stop_reason
        rest = {} if ending.usage is None else {"usage": ending.usage}
        return _event({**self._head, "choices": [choice], **rest})

    def whole(
        self, choices: list[Choice], texts: list[str], logprobs: list[Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        made = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
                "logprobs": logprob,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice, text, logprob in zip(choices, texts, logprobs, strict=True)
        ]
        return {"id": self._id, "object": "chat.completion", **self._rest, "choices": made, "usage": usage}

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice."""
        return _event({**self._head, "choices": [], "usage": usage})
