"""The body that an engine gets for a leg.

It is the client's own, byte for byte where possible. A prefill and a decode leg of one request must render the very
same prompt, or one engine would read the other's KV for other tokens; whatever field a model's template looks at
(``tools``, ``response_format``, ``reasoning_effort``, ...) is therefore left alone. The legs differ in
``kv_transfer_params`` only; that a prefill leg makes one token is the engine's business (see ``engines.port``).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from shared.contracts.inference import LegKind

TRANSFER = "kv_transfer_params"
PRIVATE = frozenset({TRANSFER, "ec_transfer_params"})
"""Orders to the engine's KV connector (whom to connect to, what to free): never a client's to give."""
PRIVATE_HINTS = (*(name.encode() for name in sorted(PRIVATE)), b"\\u", b"\x00")
"""A body without any of these cannot name a private field, not even escaped or in another encoding than UTF-8."""
HANDOVER_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
OFFER_KV = msgspec.json.encode({"do_remote_decode": True})
"""What makes vLLM's NIXL connector keep a prompt's blocks for another engine to read."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def prepare(kind: LegKind, path: str, body: bytes, kv_transfer: bytes = b"") -> bytes | None:
    """The engine's body for this leg; None when a prefill leg has nothing to prepare, because its request cannot be
    handed over and the decode leg will do it all.
    """
    if kind is LegKind.AGGREGATED and not any(hint in body for hint in PRIVATE_HINTS):
        return body
    fields = read_fields(body)
    if fields is None:
        return None if kind is LegKind.PREFILL and path not in HANDOVER_PATHS else body
    private = fields.keys() & PRIVATE
    for name in private:
        del fields[name]
    can_hand_over = path in HANDOVER_PATHS and kind is not LegKind.AGGREGATED and _is_one_plain_sequence(fields)
    if kind is LegKind.PREFILL and not can_hand_over:
        return None
    order = OFFER_KV if kind is LegKind.PREFILL else kv_transfer
    if can_hand_over and order:
        fields[TRANSFER] = msgspec.Raw(order)
    elif not private:
        return body
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
