"""The body and the KV order that an engine gets for a leg. The body is the client's, byte for byte where possible.

The prefill and decode legs of a request must render the same prompt, or one engine would read the other's KV for other
tokens. Every field that a model's template may use (``tools``, ``response_format``, ``reasoning_effort``, ...) is
therefore unchanged. The engine limits a prefill leg to one token and gets its KV order beside the body (see
``engines.port``); ``KvPolicy`` makes that order. Only vLLM's own NIXL connector gets orders in the body, as
``kv_transfer_params``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.contracts.engine_paths import CHAT, COMPLETIONS, GENERATE, PLACED, RESPONSES, SERVER_TOOLS
from shared.contracts.ids import NO_LEG
from shared.contracts.inference import LegKind, StartLeg
from shared.contracts.kv_exchange import KvOffer, LegOrder

TRANSFER = "kv_transfer_params"
SALT = "cache_salt"
SAMPLING = "sampling_params"
PRIVATE = frozenset({TRANSFER, "ec_transfer_params"})
"""Orders to the engine's KV connector, such as addresses to connect to. Removed from a client's body."""
PRIVATE_HINTS = (*(name.encode() for name in sorted(PRIVATE)), b"\\u", b"\x00")
"""A body without any of these bytes has no private field, not even with escapes or in an encoding other than UTF-8."""
UNREADABLE = b"null"
"""Replaces a body that cannot be salted, because the engine's parser might accept it without the salt."""
COMPLETION_PATHS = frozenset({COMPLETIONS, CHAT, GENERATE})
"""Paths whose events end with the engine's own finish reason, and whose streams can be resumed."""
HANDOFF_PATHS = frozenset(PLACED)
OFFER_KV = msgspec.json.encode({"do_remote_decode": True})
"""Makes vLLM's NIXL connector keep a prompt's blocks so that another engine can read them."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_offer = msgspec.msgpack.Decoder(KvOffer)


@dataclass(frozen=True, slots=True)
class LegBody:
    """The body for the engine, and whether KV may be moved for the leg."""

    body: bytes | None
    """None for a prefill leg whose request cannot be handed off: the decode leg computes everything."""
    is_plain: bool = False
    """Whether the body has one prompt and one completion; False if that was not checked."""


def own_body(path: str, body: bytes, kind: LegKind, *, moves_kv: bool) -> LegBody:
    """The client's body without private fields, for an engine that gets orders beside the body."""
    has_no_hints = not any(hint in body for hint in PRIVATE_HINTS)
    if has_no_hints and not moves_kv:
        return LegBody(body)
    fields = read_fields(body)
    if fields is None:
        return LegBody(None if kind is LegKind.PREFILL and path not in HANDOFF_PATHS else body)
    private = fields.keys() & PRIVATE
    for name in private:
        del fields[name]
    is_plain = path in HANDOFF_PATHS and _is_one_plain_sequence(path, fields)
    if kind is LegKind.PREFILL and not is_plain:
        return LegBody(None)
    return LegBody(msgspec.json.encode(fields) if private else body, is_plain)


def salted(body: bytes, salt: str) -> bytes:
    """The body with ``salt`` as its only salt; unchanged if ``salt`` is empty."""
    if not salt:
        return body
    fields = read_fields(body)
    if fields is None:
        return UNREADABLE
    fields[SALT] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def prepare(kind: LegKind, path: str, body: bytes, kv_transfer: bytes = b"") -> bytes | None:
    """``own_body`` with ``kv_transfer_params``, for an engine that gets orders in the body (vLLM's NIXL connector)."""
    order = OFFER_KV if kind is LegKind.PREFILL else kv_transfer
    own = own_body(path, body, kind, moves_kv=kind is not LegKind.AGGREGATED)
    if own.body is None or not own.is_plain or not order or kind is LegKind.AGGREGATED:
        return own.body
    fields = read_fields(own.body) or {}
    fields[TRANSFER] = msgspec.Raw(order)
    return msgspec.json.encode(fields)


def read_fields(body: bytes) -> dict[str, msgspec.Raw] | None:
    """The top-level fields, each with its original bytes; None if the body is not a JSON object."""
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(body)  # Accepts more than the standard, as the engine's server does.
        return {name: msgspec.Raw(json.dumps(item).encode()) for name, item in value.items()}
    except (ValueError, AttributeError, RecursionError):
        return None


def parameters(path: str, fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The fields with those of ``sampling_params``, where the path keeps them apart."""
    if path != GENERATE:
        return fields
    own = {name: fields[name] for name in ("stream", SAMPLING) if name in fields}
    return {**(read_fields(bytes(fields.get(SAMPLING, b""))) or {}), **own}


def _is_one_plain_sequence(path: str, fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the request is one prompt and one completion, without logits of the prompt.

    Blocks are handed off once: the first of several sequences would release blocks that the others still read. Logits
    exist only on the engine that computed the prompt.
    """
    try:
        fields = parameters(path, fields)
        return not (_asks_for_more(fields) or (path == RESPONSES and goes_on_alone(fields)))
    except (ValueError, RecursionError):  # The engine reports the error.
        return False


def _asks_for_more(fields: dict[str, msgspec.Raw]) -> bool:
    return (
        _value(fields, "n") not in (None, 1)
        or _value(fields, "best_of") not in (None, 1)
        or bool(_value(fields, "use_beam_search"))
        or _value(fields, "prompt_embeds") is not None
        or _value(fields, "prompt_logprobs") is not None
        or _value(fields, "prompt_logprob_token_ids") is not None
        or bool(_value(fields, "skip_reading_prefix_cache"))
        or bool(_value(fields, "trace_decode_token_ids"))
        or (bool(_value(fields, "echo")) and _value(fields, "logprobs") not in (None, False))
        or not _is_one_prompt(_value(fields, "prompt"))
    )


def goes_on_alone(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the engine's server keeps this response, needs one that it kept, or runs tools and asks the engine again.
    Raises ValueError, RecursionError.
    """
    if _value(fields, "background") or _value(fields, "previous_response_id") is not None:
        return True
    tools = _value(fields, "tools") or []
    return not isinstance(tools, list) or any(
        not isinstance(it, dict) or it.get("type") in SERVER_TOOLS for it in tools
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


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Defaults of the worker; a request may override them."""

    cache_hit_threshold: float = 0.0
    fetch_min_tokens: int = 0

    def order(self, start: StartLeg, *, is_plain: bool, can_refuse: bool) -> LegOrder:
        """``is_plain``: KV may be moved for the leg. ``can_refuse``: the router understands a refusal on its path. A
        resumed stream is never refused.
        """
        threshold = self.cache_hit_threshold if start.cache_hit_threshold is None else start.cache_hit_threshold
        least = self.fetch_min_tokens if start.kv_fetch_min_tokens is None else start.kv_fetch_min_tokens
        is_exempt = start.kind is LegKind.PREFILL or not can_refuse or start.resume is not None
        offers = is_plain and start.kind is LegKind.PREFILL and start.kv_offer
        moves = LegOrder(
            leg_id=start.leg_id if is_plain and start.kind is LegKind.PREFILL else NO_LEG,
            offer=offers,
            offer_id=start.leg_id if offers else "",
            take=read_offer(start.kv_transfer) if is_plain and start.kind is LegKind.DECODE else None,
            sources=start.kv_sources if is_plain else [],
            cache_hit_threshold=0.0 if is_exempt else threshold,
            fetch_min_tokens=least,
            recomputes=start.kind is LegKind.DECODE or start.resume is not None,
            itl_target_s=start.itl_target_s,
        )
        return msgspec.structs.replace(moves, wait_s_max=min(moves.wait_s_max, start.deadline_s))


def moves_kv(start: StartLeg) -> bool:
    return start.kind is LegKind.PREFILL or bool(start.kv_transfer or start.kv_sources)


def read_offer(packed: bytes) -> KvOffer | None:
    """None for an unreadable offer; the engine computes the prompt then."""
    try:
        return _offer.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
