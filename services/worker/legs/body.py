"""The body that an engine gets for a leg.

It is the client's own, byte for byte where possible. A prefill and a decode leg of one request must render the very
same prompt, or one engine would read the other's KV for other tokens; whatever field a model's template looks at
(``tools``, ``response_format``, ``reasoning_effort``, ...) is therefore left alone. That a prefill leg makes one token
is the engine's business, and so are orders about KV (see ``engines.port``); only for vLLM's own NIXL connector they
travel in the body, as ``kv_transfer_params``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.contracts.inference import LegKind

TRANSFER = "kv_transfer_params"
SALT = "cache_salt"
PRIVATE = frozenset({TRANSFER, "ec_transfer_params"})
"""Orders to the engine's KV connector (whom to connect to, what to free): never a client's to give."""
PRIVATE_HINTS = (*(name.encode() for name in sorted(PRIVATE)), b"\\u", b"\x00")
"""A body without any of these cannot name a private field, not even escaped or in another encoding than UTF-8."""
UNREADABLE = b"null"
"""Instead of a body that cannot be salted: an engine might read it otherwise."""
HANDOVER_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
OFFER_KV = msgspec.json.encode({"do_remote_decode": True})
"""What makes vLLM's NIXL connector keep a prompt's blocks for another engine to read."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class LegBody:
    """What the engine gets, and whether KV may be moved for it."""

    body: bytes | None
    """None when a prefill leg has nothing to prepare, because its request cannot be handed over and the decode leg will
    do it all."""
    is_plain: bool = False
    """One prompt and one completion; only looked at when asked to."""


def own_body(path: str, body: bytes, kind: LegKind, *, moves_kv: bool) -> LegBody:
    """For an engine that gets its orders beside the body: the client's own, without private fields."""
    looks_clean = not any(hint in body for hint in PRIVATE_HINTS)
    if looks_clean and not moves_kv:
        return LegBody(body)
    fields = read_fields(body)
    if fields is None:
        return LegBody(None if kind is LegKind.PREFILL and path not in HANDOVER_PATHS else body)
    private = fields.keys() & PRIVATE
    for name in private:
        del fields[name]
    is_plain = path in HANDOVER_PATHS and _is_one_plain_sequence(fields)
    if kind is LegKind.PREFILL and not is_plain:
        return LegBody(None)
    return LegBody(msgspec.json.encode(fields) if private else body, is_plain)


def salted(body: bytes, salt: str) -> bytes:
    """The body with this salt instead of its own; as it is where there is none. A field given twice is there once."""
    if not salt:
        return body
    fields = read_fields(body)
    if fields is None:
        return UNREADABLE
    fields[SALT] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def prepare(kind: LegKind, path: str, body: bytes, kv_transfer: bytes = b"") -> bytes | None:
    """For an engine whose orders are in the body (vLLM's NIXL connector): the same, with ``kv_transfer_params``."""
    order = OFFER_KV if kind is LegKind.PREFILL else kv_transfer
    own = own_body(path, body, kind, moves_kv=kind is not LegKind.AGGREGATED)
    if own.body is None or not own.is_plain or not order or kind is LegKind.AGGREGATED:
        return own.body
    fields = read_fields(own.body) or {}
    fields[TRANSFER] = msgspec.Raw(order)
    return msgspec.json.encode(fields)


def read_fields(body: bytes) -> dict[str, msgspec.Raw] | None:
    """The top-level fields, each as it was written; None when the body is no JSON object."""
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(body)  # accepts more than the standard, as the engine's server does
        return {name: msgspec.Raw(json.dumps(item).encode()) for name, item in value.items()}
    except (ValueError, AttributeError, RecursionError):
        return None


def _is_one_plain_sequence(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the request is one prompt and one completion whose prompt logits nobody asks for.

    Blocks are handed over once: of several sequences, the first to arrive would release what the others still read. And
    logits exist only where the prompt was computed. ``truncate_prompt_tokens`` of -1 means "as fits".
    """
    try:
        return not _asks_for_more(fields)
    except (ValueError, RecursionError):  # The engine will say what is wrong with it.
        return False


def _asks_for_more(fields: dict[str, msgspec.Raw]) -> bool:
    return (
        _value(fields, "n") not in (None, 1)
        or _value(fields, "best_of") not in (None, 1)
        or bool(_value(fields, "use_beam_search"))
        or _value(fields, "prompt_embeds") is not None
        or _value(fields, "prompt_logprobs") is not None
        or (bool(_value(fields, "echo")) and _value(fields, "logprobs") not in (None, False))
        or not _is_one_prompt(_value(fields, "prompt"))
    )


def _is_one_prompt(prompt: Any) -> bool:
    if not isinstance(prompt, list) or len(prompt) <= 1:
        return True
    return not isinstance(prompt[0], str | list)


def _value(fields: dict[str, msgspec.Raw], name: str) -> Any:
    raw = fields.get(name)
    if raw is None:
        return None
    return json.loads(bytes(raw))
