"""Requests and responses of ``/v1/responses`` as a router keeps them: what a body asks for, and the body without state
that gives an engine the same conversation.

The conversation is the one that OpenAI describes: the input items of all earlier turns and what the model made of them,
in order, then the new input. ``instructions`` count for one request only.
"""

from __future__ import annotations

from typing import Any

import msgspec

ID_CHARS_MAX = 256
"""Maximum length of a response's id, which vLLM lets clients choose."""
COMPLETED, INCOMPLETE, FAILED = "completed", "incomplete", "failed"
QUEUED, CANCELLED = "queued", "cancelled"
CONTINUED = frozenset({COMPLETED, INCOMPLETE})
"""A response with another status cannot be continued."""
TRUE, FALSE = msgspec.Raw(b"true"), msgspec.Raw(b"false")
EMPTY = msgspec.Raw(b"")
STATE_FIELDS = ("previous_response_id", "background")
"""Fields of a body, besides ``store``, whose orders routers carry out."""
ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
)
"""Fields of a body that the response in progress repeats."""
ECHOED_DEFAULTS = {
    "instructions": b"null",
    "metadata": b"{}",
    "parallel_tool_calls": b"true",
    "tool_choice": b'"auto"',
    "tools": b"[]",
}

Fields = dict[str, msgspec.Raw]


class BadRequest(Exception):
    """What the body asks for is not possible. The message is the client's."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is kept."""

    response: msgspec.Raw
    items: list[msgspec.Raw]
    """The whole input: of all earlier turns, and of this one."""
    router_id: str = ""
    """The router that makes it, while it is in progress."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a response that routers need."""

    id: str
    status: str = ""
    background: bool | None = None
    output: list[msgspec.Raw] = msgspec.field(default_factory=list)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks of the router."""

    fields: Fields
    store: bool
    stream: bool
    background: bool
    previous_id: str
    is_prefetch: bool = False
    """Nothing is answered that could be kept."""


_fields = msgspec.json.Decoder(Fields)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_kept = msgspec.json.Decoder(Kept)
encode = msgspec.json.encode


def read_wanted(body: bytes) -> Wanted | None:
    """None: the body asks for no state, or an engine will say what is wrong with it. Raises BadRequest."""
    fields = fields_of(body)
    if fields is None:
        return None
    store, background = _flag(fields, "store", default=True), _flag(fields, "background", default=False)
    previous = _text(fields, "previous_response_id")
    if store is None or background is None or previous is None:
        return None
    _check(fields, store=store, background=background, previous=previous)
    is_prefetch = _is_prefetch(fields)
    if is_prefetch and background:
        raise BadRequest("A prefetch is no response in the background: leave out `background`.", "background")
    store = store and not is_prefetch
    if not (store or background or previous):
        return None
    return Wanted(
        fields=fields,
        store=store,
        stream=_is_true(fields, "stream"),
        background=background,
        previous_id=previous,
        is_prefetch=is_prefetch,
    )


def _is_prefetch(fields: Fields) -> bool:
    """Whether the body orders a prefetch; if its ``baton`` cannot be read, the relay says so."""
    own = fields_of(fields.get("baton", EMPTY))
    return own is not None and _is_true(own, "prefetch")


def _check(fields: Fields, *, store: bool, background: bool, previous: str) -> None:
    for name in ("conversation", "previous_input_messages"):
        if previous and _is_given(fields, name):
            raise BadRequest(f"`previous_response_id` and `{name}` cannot be used together.", "previous_response_id")
    if _is_given(fields, "conversation"):
        raise BadRequest("Conversations are not kept; use `previous_response_id`.", "conversation")
    if background and not store:
        raise BadRequest("background can only be used when `store` is true.", "background")
    if background and _is_true(fields, "stream"):
        raise BadRequest("A response in the background cannot be streamed; ask for it with GET.", "stream")


def fields_of(data: bytes | msgspec.Raw) -> Fields | None:
    """The top-level fields of a JSON object; None for anything else."""
    try:
        return _fields.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def input_items(fields: Fields) -> list[msgspec.Raw] | None:
    """The body's input as items; None if an engine would refuse it."""
    raw = fields.get("input", EMPTY)
    try:
        if bytes(memoryview(raw)[:1]) == b'"':
            return [msgspec.Raw(b'{"role":"user","content":%b}' % bytes(raw))]
        return _items.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def stateless(fields: Fields, items: list[msgspec.Raw] | None) -> bytes:
    """The body for an engine that keeps nothing. ``items`` replace its input."""
    rest = {name: value for name, value in fields.items() if name not in STATE_FIELDS}
    if items is not None:
        rest["input"] = msgspec.Raw(encode(items))
    return encode({**rest, "store": FALSE})


def continued(entry: StoredResponse, new: list[msgspec.Raw]) -> list[msgspec.Raw]:
    """The input of the next turn. Raises BadRequest for a response that has no end to continue from."""
    before = read_kept(entry.response)
    if before is None or before.status not in CONTINUED:
        status = before.status if before is not None else "unknown"
        raise BadRequest(
            f"The previous response has the status `{status}`; only one that is completed or incomplete can be "
            "continued.",
            "previous_response_id",
        )
    return [*entry.items, *before.output, *new]


def read_kept(response: bytes | msgspec.Raw) -> Kept | None:
    """None for what is no response object with an id that can be kept."""
    try:
        kept = _kept.decode(response)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return kept if 0 < len(kept.id) <= ID_CHARS_MAX else None


def with_fields(response: bytes | msgspec.Raw, /, **values: Any) -> bytes | None:
    """The response object with these values; None if it is no object."""
    fields = fields_of(response)
    if fields is None:
        return None
    return encode({**fields, **{name: msgspec.Raw(encode(value)) for name, value in values.items()}})


def queued(fields: Fields, response_id: str, created_at: int, previous_id: str) -> bytes:
    """The object of a response that is being made in the background. As at vLLM's server, it stays queued until it has
    ended.
    """
    echoed = {name: fields.get(name, msgspec.Raw(ECHOED_DEFAULTS.get(name, b"null"))) for name in ECHOED}
    own = {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": QUEUED,
        "background": True,
        "store": True,
        "previous_response_id": previous_id or None,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
    }
    return encode({**echoed, **own})


def ended(response: bytes | msgspec.Raw, status: str, message: str = "") -> bytes:
    """The response object of one that ended without an answer."""
    error = {"code": "server_error", "message": message} if message else None
    return with_fields(response, status=status, error=error) or b"{}"


def _is_given(fields: Fields, name: str) -> bool:
    return bytes(memoryview(fields.get(name, EMPTY))[:5]) not in (b"", b"null")


def _is_true(fields: Fields, name: str) -> bool:
    return bytes(memoryview(fields.get(name, EMPTY))[:5]) == b"true"


def _flag(fields: Fields, name: str, *, default: bool) -> bool | None:
    """None for a value that an engine must judge."""
    beginning = bytes(memoryview(fields.get(name, EMPTY))[:6])
    return {b"": default, b"null": default, b"true": True, b"false": False}.get(beginning)


def _text(fields: Fields, name: str) -> str | None:
    """Empty where it is not given; None for a value that an engine must judge."""
    if not _is_given(fields, name):
        return ""
    raw = fields[name]
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        if len(memoryview(raw)) <= 6 * ID_CHARS_MAX + 2:  # JSON may escape each character.
            return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise BadRequest(f"`{name}` must be the id of a response.", name)
