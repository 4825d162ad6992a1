"""Completions of a request: their texts, and the bytes of OpenAI's and Anthropic's endpoints, with vLLM's additional
fields.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from services.worker.engines.port import EngineDead
from services.worker.engines.simulated.core.batch import LENGTH, STOP, Sequence


class StopStrings:
    """Holds back text that may be the beginning of a stop string, as vLLM's detokenizer does."""

    def __init__(self, stops: list[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held_back = max(map(len, stops)) - 1
        self._pending = ""
        self.matched = ""
        """The stop string that was found; the completion has ended then."""

    def feed(self, text: str, *, last: bool = False) -> str:
        """Add text; returns the text that may be sent. ``last``: no text follows, so none is held back."""
        self._pending += text
        found = min(((at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            shown, self._pending = self._pending[: at + len(self.matched) * self._include], ""
            return shown
        split = len(self._pending) if last else max(0, len(self._pending) - self._held_back)
        shown, self._pending = self._pending[:split], self._pending[split:]
        return shown


class Inbox:
    """Tokens of all choices of one request, from the engine to the request's task. Bounded by their max_tokens."""

    __slots__ = ("_dead", "_tokens", "_waiter")

    def __init__(self) -> None:
        self._tokens: list[tuple[Choice, int | None, str]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._dead = ""

    def put(self, choice: Choice, token: int | None, finish_reason: str) -> None:
        """Called by the engine: one more token, or None for a refused sequence; ``finish_reason`` is set at the end."""
        self._tokens.append((choice, token, finish_reason))
        self._wake()

    def fail(self, reason: str) -> None:
        """Called by the engine when it has died: no token follows."""
        self._dead = reason
        self._wake()

    async def take(self) -> list[tuple[Choice, int | None, str]]:
        """All tokens that have arrived, in order; waits for at least one. Raises EngineDead."""
        while not self._tokens:
            if self._dead:
                raise EngineDead(self._dead)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._tokens = self._tokens, []
        return tokens

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Choice:
    """One completion of one prompt."""

    index: int
    prompt: list[int]
    inbox: Inbox
    stops: StopStrings | None = None
    sequence: Sequence | None = None
    token_ids: list[int] = field(default_factory=list)
    resumed: int = 0
    """How many of ``token_ids`` another engine generated before this leg; see ``resume``."""
    shown: list[str] = field(default_factory=list)
    """The text so far, in pieces."""
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def has_ended(self) -> bool:
        """Whether the engine or a stop string has ended it."""
        return bool(self.finish_reason)

    def is_at_start(self) -> bool:
        """Whether this engine has generated no token of it yet."""
        return len(self.token_ids) == self.resumed

    def refuse(self, finish_reason: str) -> str:
        """End the choice without another token; returns the text that may be sent now."""
        self.finish_reason = finish_reason
        text = "" if self.stops is None else self.stops.feed("", last=True)
        self.shown.append(text)
        return text

    def add(self, token: int, text: str, finish_reason: str) -> str:
        """Add a token whose text is ``text``; returns the text that may be sent now."""
        self.token_ids.append(token)
        self.finish_reason = finish_reason
        if finish_reason == STOP:
            text = ""  # The text of an end token or stop token is not part of the completion.
            if self.sequence is not None and token in self.sequence.params.stop_token_ids:
                self.stop_reason = token
        if self.stops is not None:
            text = self.stops.feed(text, last=bool(finish_reason))
            if self.stops.matched:
                self.finish_reason, self.stop_reason = STOP, self.stops.matched
        self.shown.append(text)
        return text


def made_up_logprob(token: int) -> float:
    """A deterministic number: the simulated model has no probabilities."""
    return -(1 + token % 97) / 97


def completion_logprobs(
    tokens: list[int], texts: list[str], offset: int, *, top: int, also: Iterable[int] = (), as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of /v1/completions; ``offset`` is the position of the first token in the text. ``also``: further
    tokens whose probabilities are wanted; ``as_ids``: tokens are named by their ids, not by their texts.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    names = [f"token_id:{token}" for token in tokens] if as_ids else texts
    others = {f"token_id:{token}": made_up_logprob(token) for token in also}
    return {
        "text_offset": offsets,
        "token_logprobs": [made_up_logprob(token) for token in tokens],
        "tokens": names,
        "top_logprobs": [
            {name: made_up_logprob(token), **others} if top else None for token, name in zip(tokens, names, strict=True)
        ],
    }


def chat_logprobs(tokens: list[int], texts: list[str], _offset: int, *, top: int) -> dict[str, Any]:
    """``logprobs`` of /v1/chat/completions."""
    entries = [
        {"token": text, "logprob": made_up_logprob(token), "bytes": list(text.encode())}
        for token, text in zip(tokens, texts, strict=True)
    ]
    return {"content": [{**entry, "top_logprobs": [entry] if top else []} for entry in entries]}


DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_PLACE = "\x00"
_PLACE_JSON = b'"\\u0000"'

encode = msgspec.json.encode


class Responses(Protocol):
    """Encodes the response to one request."""

    done: bytes
    """End of a stream."""

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
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class _ChoiceResponses:
    """What completions and chats have in common: choices, and an event for each piece of one."""

    done = DONE

    def __init__(self, model: str, identifier: str, kind: str, chunk_kind: str) -> None:
        rest = {"created": int(time.time()), "model": model}
        self._head = {"id": identifier, "object": chunk_kind, **rest}
        self._whole_head = {"id": identifier, "object": kind, **rest}

    def whole(
        self, choices: list[Choice], texts: list[str], logprobs: list[Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        made = [
            {
                "index": choice.index,
                **self._content(text),
                "logprobs": logprob,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice, text, logprob in zip(choices, texts, logprobs, strict=True)
        ]
        return {**self._whole_head, "choices": made, "usage": usage}

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice."""
        return self._event([], usage)

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        rest = {} if usage is None else {"usage": usage}
        return b"data: " + encode({**self._head, "choices": choices, **rest}) + b"\n\n"


class CompletionResponses(_ChoiceResponses):
    def __init__(self, model: str, request_id: str) -> None:
        super().__init__(model, f"cmpl-{request_id or uuid.uuid4().hex}", "text_completion", "text_completion")

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
        return self._event([choice], ending.usage)

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatResponses(_ChoiceResponses):
    def __init__(self, model: str, request_id: str) -> None:
        identifier = f"chatcmpl-{request_id or uuid.uuid4().hex}"
        super().__init__(model, identifier, "chat.completion", "chat.completion.chunk")

    def opening(self, index: int) -> bytes:
        """An event with the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([choice])

    def chunk(self, index: int, text: str, ending: Ending) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": text},
            "logprobs": ending.logprobs,
            "finish_reason": ending.finish_reason,
        }
        if ending.finish_reason is not None:
            choice["stop_reason"] = ending.stop_reason
        return self._event([choice], ending.usage)

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}


class MessageObjects:
    """/v1/messages of Anthropic's API, with one block of text. Events have names."""

    done = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def __init__(self, model: str, answer_id: str, prompt_tokens: int) -> None:
        self._head = {"id": f"msg_{answer_id or uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._ending = UNFINISHED

    def opening(self, _index: int) -> bytes:
        """The events before the first text."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "usage": usage,
        }
        block = {"type": "text", "text": ""}
        return _named("message_start", message=message) + _named("content_block_start", index=0, content_block=block)

    def chunk(self, _index: int, text: str, ending: Ending) -> bytes:
        """The text; at its end the block's end."""
        event = _named("content_block_delta", index=0, delta={"type": "text_delta", "text": text}) if text else b""
        if ending.finish_reason is None:
            return event
        self._ending = ending
        return event + _named("content_block_stop", index=0)

    def whole(
        self, choices: list[Choice], texts: list[str], _logprobs: list[Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        content = [{"type": "text", "text": text} for text in texts]
        end = _anthropic_end(choices[0].finish_reason, choices[0].stop_reason)
        return {**self._head, "content": content, "model": self._model, **end, "usage": _anthropic_usage(usage)}

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event that says why the message ended, and what it used."""
        end = _anthropic_end(self._ending.finish_reason, self._ending.stop_reason)
        return _named("message_delta", delta=end, usage=_anthropic_usage(usage))


def _anthropic_end(finish_reason: str | None, stop_reason: str | int | None) -> dict[str, str]:
    if finish_reason == LENGTH:
        return {"stop_reason": "max_tokens"}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn"}


def _anthropic_usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _named(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


class ResponseObjects:
    """/v1/responses, with one message of text. Events have names and numbers; the last one has the whole response."""

    done = b""

    def __init__(self, model: str, answer_id: str, instructions: str | None) -> None:
        self._model = model
        self._instructions = instructions
        drawn = answer_id or uuid.uuid4().hex
        self._id, self._item_id = f"resp_{drawn}", f"msg_{drawn}"
        self._created_at = int(time.time())
        self._shown: list[str] = []
        self._events = 0

    def opening(self, _index: int) -> bytes:
        """The events before the first text."""
        response = self._response("in_progress", [], None)
        return b"".join((
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", None)),
            self._part_event("response.content_part.added", part=_part("")),
        ))  # fmt: skip

    def chunk(self, _index: int, text: str, ending: Ending) -> bytes:
        """The text, and at the end all events that follow."""
        self._shown.append(text)
        event = self._part_event("response.output_text.delta", delta=text, logprobs=[])
        if ending.finish_reason is None:
            return event
        whole, status = "".join(self._shown), _status(ending.finish_reason)
        item = self._message(status, whole)
        return b"".join((
            event,
            self._part_event("response.output_text.done", text=whole, logprobs=[]),
            self._part_event("response.content_part.done", part=_part(whole)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event("response.completed", response=self._response(status, [item], ending.usage)),
        ))  # fmt: skip

    def whole(
        self, choices: list[Choice], texts: list[str], _logprobs: list[Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        status = _status(choices[0].finish_reason)
        return self._response(status, [self._message(status, texts[0])], usage)

    def usage(self, _usage: dict[str, Any]) -> bytes:
        """b"": the last event has the usage."""
        return b""

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return _named(kind, sequence_number=self._events - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "model": self._model,
            "instructions": self._instructions,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "metadata": None,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": None if usage is None else _response_usage(usage),
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == LENGTH else "completed"


def _response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
