"""The client's body as a server outside of Baton gets it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from services.worker.legs.body import PRIVATE, SALT, read_fields
from shared.contracts.engine_paths import CHAT, COMPLETIONS

OWN_FIELDS = frozenset({"baton", "cache_hit_threshold", "kv_fetch_min_tokens"}) | PRIVATE
"""Orders to Baton. A server may refuse a body with fields that it does not know."""


class ServerBody(NamedTuple):
    """What the server gets."""

    body: bytes
    model: str
    """As the client named it; empty if it named none."""
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
    asked = _value(fields, "model")
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    stream = bool(_value(fields, "stream"))
    hides_usage = stream and path in (CHAT, COMPLETIONS) and _asks_usage(fields)
    return ServerBody(msgspec.json.encode(fields), asked if isinstance(asked, str) else "", stream, hides_usage)


def _asks_usage(fields: dict[str, msgspec.Raw]) -> bool:
    """Ask for the usage of a stream; returns whether the client had not."""
    options = _value(fields, "stream_options")
    if options is not None and not isinstance(options, dict):
        return False  # The server reports the error.
    if (options or {}).get("include_usage"):
        return False
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**(options or {}), "include_usage": True}))
    return True


def _value(fields: dict[str, msgspec.Raw], name: str) -> Any:
    raw = fields.get(name)
    try:
        return None if raw is None else json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return None
