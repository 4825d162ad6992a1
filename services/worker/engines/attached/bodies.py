"""Bodies as a server outside of Baton gets and sends them: the client's body; and its answer, which is not trusted, cut
into whole events and read for what a leg reports.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from services.worker.legs.body import PRIVATE, SALT, read_fields
from shared.contracts.engine_paths import CHAT, COMPLETIONS

OWN_FIELDS = frozenset({"baton", "cache_hit_threshold", "kv_fetch_min_tokens"}) | PRIVATE
"""Orders to Baton. A server may refuse a body with fields that it does not know."""


class ServerBody(NamedTuple):
    body: bytes
    model: str
    """Model as the client named it; empty if it named none."""
    stream: bool
    hides_usage: bool
    """The server was asked for the usage of a stream whose client has not asked for it."""


def server_body(path: str, body: bytes, model: str, *, salts: bool) -> ServerBody | None:
    """The body with ``model`` as its model. ``salts``: whether the server knows vLLM's ``cache_salt``. None if the body
    is no JSON object.
    """
    fields = read_fields(body)
    if fields is None:
        return None
    for name in OWN_FIELDS & fields.keys():
        del fields[name]
    if not salts:
        fields.pop(SALT, None)
    asked = _value_asked(fields, "model")
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    stream = bool(_value_asked(fields, "stream"))
    hides_usage = stream and path in (CHAT, COMPLETIONS) and _asks_usage(fields)
    return ServerBody(msgspec.json.encode(fields), asked if isinstance(asked, str) else "", stream, hides_usage)


def _asks_usage(fields: dict[str, msgspec.Raw]) -> bool:
    """Ask for the usage of a stream; returns whether the client had not."""
    options = _value_asked(fields, "stream_options")
    if options is not None and not isinstance(options, dict):
        return False  # The server reports the error.
    if (options or {}).get("include_usage"):
        return False
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**(options or {}), "include_usage": True}))
    return True


def _value_asked(fields: dict[str, msgspec.Raw], name: str) -> Any:
    raw = fields.get(name)
    try:
        return None if raw is None else json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return None


EVENT_BYTES_MAX = 4 << 20
"""Maximum size of one event, or of a line without an end: more than any server has a reason to send."""
DONE = b"[DONE]"
DATA = b"data:"
LAST_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
INNER = ("response", "message")
"""Fields of an event of messages and responses that hold the whole answer, or its beginning."""
TOKENS_MAX = 1 << 40
TEXT_CHARS_MAX = 64

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode


class BadAnswer(Exception):
    """The server sent what is no answer; the message says what."""


class EventCutter:
    """Bytes in, whole events out, each with its end. A line may end with CR, LF or both, as the standard says."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """The events that are complete now. Raises BadAnswer for one that is too large."""
        text = self._rest + data
        held = b"\r" if text.endswith(b"\r") else b""  # It may be half of a line end.
        text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = text.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > EVENT_BYTES_MAX or any(len(event) > EVENT_BYTES_MAX for event in events):
            raise BadAnswer(f"it sent an event of more than {EVENT_BYTES_MAX} bytes")
        return [event.strip(b"\n") + b"\n\n" for event in events if event.strip(b"\n")]


class Usage(msgspec.Struct):
    """Tokens as a server counts them; -1: it has not said."""

    prompt: int = -1
    cached: int = -1
    completion: int = -1

    def note(self, raw: Any) -> None:
        """A ``usage`` object of any of the APIs; what is no count is ignored."""
        if not isinstance(raw, dict):
            return
        details = raw.get("prompt_tokens_details") or raw.get("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else raw.get("cache_read_input_tokens")
        prompt = raw.get("prompt_tokens", raw.get("input_tokens"))
        completion = raw.get("completion_tokens", raw.get("output_tokens"))
        self.prompt = _count(prompt, self.prompt)
        self.cached = _count(cached, self.cached)
        self.completion = _count(completion, self.completion)


class AnswerReader:
    """Reads an answer, whole or as events, and gives it back under the name by which the client asked for the model."""

    def __init__(self, path: str, model: str, *, hides_usage: bool = False) -> None:
        """``hides_usage``: the client has not asked for the event that has nothing but usage."""
        self.usage = Usage()
        self.finish_reason = ""
        self.events = 0
        self.is_complete = False
        """Whether the answer's last event has come."""
        self._path = path
        self._model = msgspec.Raw(_encode(model))
        self._hides_usage = hides_usage

    def event(self, event: bytes) -> bytes:
        """The event for the client; empty for one that it must not get. Raises BadAnswer."""
        lines = event.rstrip(b"\n").split(b"\n")
        data = b"\n".join(line[len(DATA) :].removeprefix(b" ") for line in lines if line.startswith(DATA))
        if not data:
            return event  # A comment, which keeps the connection open.
        if data.strip() == DONE:
            self.is_complete = True
            return event
        fields = self._read(data)
        if self._hides_usage and _raw(fields, "choices") == b"[]" and "usage" in fields:
            return b""
        self.events += 1
        before = [line for line in lines if not line.startswith((DATA, b"id:", b"retry:"))]
        return b"\n".join([*before, b"data: " + _encode(fields)]) + b"\n\n"

    def whole(self, body: bytes) -> bytes:
        """A whole answer for the client. Raises BadAnswer."""
        fields = self._read(body)
        self.is_complete = True
        return _encode(fields)

    def _read(self, data: bytes) -> dict[str, msgspec.Raw]:
        try:
            fields = _fields.decode(data)
            if "error" in fields and "choices" not in fields and _raw(fields, "error") != b"null":
                self.finish_reason = self.finish_reason or "error"
            self._note(fields)
            for name in INNER:
                if (inner := _raw(fields, name)).startswith(b"{"):
                    fields[name] = msgspec.Raw(_encode(self._inner(inner)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadAnswer(f"it sent what is no JSON object: {error}") from None
        if "model" in fields:
            fields["model"] = self._model
        return fields

    def _inner(self, raw: bytes) -> dict[str, msgspec.Raw]:
        fields = _fields.decode(raw)
        self._note(fields)
        if "model" in fields:
            fields["model"] = self._model
        return fields

    def _note(self, fields: dict[str, msgspec.Raw]) -> None:
        self.usage.note(_value(fields, "usage"))
        if self._path in (CHAT, COMPLETIONS):
            choices = _value(fields, "choices") if b'"finish_reason"' in _raw(fields, "choices") else None
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict):
                    self._end(choice.get("finish_reason"))
            return
        kind, delta = _value(fields, "type"), _value(fields, "delta")
        if isinstance(delta, dict):
            self._end(delta.get("stop_reason"))
        if _value(fields, "status") in ("completed", "incomplete", "failed") and "output" in fields:
            self._end(_value(fields, "status"))
        self._end(_value(fields, "stop_reason"))
        if kind in LAST_TYPES:
            self.is_complete = True

    def _end(self, reason: Any) -> None:
        if isinstance(reason, str) and reason:
            self.finish_reason = reason[:TEXT_CHARS_MAX]


def _raw(fields: dict[str, msgspec.Raw], name: str) -> bytes:
    """A field as it was sent; empty where it is missing."""
    return bytes(fields[name]).strip() if name in fields else b""


def _value(fields: dict[str, msgspec.Raw], name: str) -> Any:
    """A field that is needed; None where it is missing. Raises DecodeError."""
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def _count(value: Any, known: int) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= TOKENS_MAX
    return value if is_count else known
