"""What a client's JSON body may hold, so that reading it costs no more than its size suggests.

The router applies these rules before it reads a body, the worker before it gives the body to the engine's server: the
parsers and the template renderer of that server have no such limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np

FIELDS_MAX: Final = 1 << 17
"""Objects, arrays and named fields together. Each costs a parser up to 200 bytes."""
FIELD_BYTES_MIN: Final = 2
"""``[]``. One that is not closed takes a byte less, but of those a parser reads about a thousand at most."""
HARMLESS_BYTES_MAX: Final = FIELDS_MAX * FIELD_BYTES_MIN
"""No shorter body can have too many fields."""
VALUES_MAX: Final = 1 << 20
"""Values that follow another one. A prompt of token ids has one for each token."""
STEP_BYTES: Final = 1 << 16
"""Examined without a pause in which another thread may run, a millisecond at most."""

TEMPLATE_NAMES = frozenset((
    "caller", "cycler", "dict", "joiner", "kwargs", "lipsum", "loop", "namespace", "raise_exception", "range", "self",
    "strftime_now", "super", "varargs",
))  # fmt: skip
"""Names that the template engine defines, and that templates call."""
RENDERING_ARGUMENTS = frozenset((
    "additional_special_tokens", "chat_template", "conversation", "extra_special_tokens", "max_length", "messages",
    "model_config", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer",
    "tokenizer_kwargs", "truncation",
))  # fmt: skip
"""Arguments of the call that renders and tokenizes: a client could have it pad a prompt to any length."""
SPECIAL_NAME_END = "_token"
"""End of the names of special tokens, such as ``eos_token`` and ``image_token``. ``add_eos_token`` is a flag."""
FLAG_PREFIX = "add_"

BRACKET_BIT: Final = ord("[") ^ ord("{")
"""The only one in which they differ."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The mark of UTF-8, which some clients put before JSON. RFC 8259 lets a reader ignore it."""
BYTE_ORDER_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
"""Marks of UTF-16, in which single bytes do not show quotes. Python's parser accepts it and UTF-32, unlike the
standard."""

PROMPT_CHARS_PER_TOKEN_MAX = 32
PROMPT_CHARS_MIN = 256 * 1024
"""Characters of a rendered chat per token of the model's maximum length, and the least that any chat may have."""


RUN_CHARS_PER_TOKEN_MAX = 4
RUN_CHARS_MIN = 128 * 1024
"""Characters between two boundaries of words, per token of the model's maximum length, and the least that any text may
have. A tokenizer takes seconds for a million of them, and cannot be interrupted.
"""
TOKENS_ANSWERED_MIN = 256 * 1024
"""Tokens that any model's server may make of one text, such as one that is only to be counted or cut."""
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PAIRED = re.compile(rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|%b%b)*+" % (_HIGH, _LOW), re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF_IN_BYTES = re.compile(rb"\xed[\xa0-\xbf]")


WITHHELD = {
    "kv_transfer_params": "Baton chooses the engines that hand over KV, and finds blocks by their content",
    "ec_transfer_params": "Baton chooses the engines, and hands over no encoder's cache",
    "features": "its tensors and their names would bypass the engine's own processor; send media in a chat",
    "content_parts": "its tokens would not be those that are computed; send media in a chat",
}
"""Fields of ``/inference/v1/generate`` that no client may set, and why."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def lone_surrogate(body: bytes) -> int:
    """Where a text of the body has half of a surrogate pair, which is no character: no UTF-8 can hold it. Less than 0
    if it has none.
    """
    if b"\xed" in body and (found := _HALF_IN_BYTES.search(body)) is not None:
        return found.start()
    if b"\\ud" not in body and b"\\uD" not in body:
        return -1
    paired = _PAIRED.match(body)
    at = paired.end() if paired is not None else 0
    return at if body[at : at + 3] in (b"\\ud", b"\\uD") else -1


def field_at(body: bytes, at: int) -> str:
    """The field of the body's object that has this byte; empty where that cannot be read."""
    # msgspec reads no half of a pair. Bytes stay where they are.
    body = _HALF_IN_BYTES.sub(b"\xed\x80", _HALF.sub(rb"\\u00", body))
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    end = 0
    for name, value in fields.items():  # in the body's order, unless a name is repeated
        end = body.find(bytes(value), end) + len(memoryview(value))
        if at < end:
            return name
    return ""


class TextTooLong(ValueError):
    """A template has made more text than fits into the model's context."""


def prompt_chars_max(max_model_len: int) -> int:
    """Characters of a rendered chat, at most: generously more than a model can read."""
    return max(PROMPT_CHARS_MIN, PROMPT_CHARS_PER_TOKEN_MAX * max_model_len)


def text_fault(text: str, max_model_len: int) -> str:
    """What makes the text too costly to tokenize, as the end of a sentence; empty when nothing does."""
    chars_max = prompt_chars_max(max_model_len)
    if len(text) > chars_max:
        return (
            f"has {len(text)} characters; at most {chars_max} are tokenized at once for a model of {max_model_len} "
            "tokens. Send it in several requests"
        )
    run = max(RUN_CHARS_MIN, RUN_CHARS_PER_TOKEN_MAX * max_model_len)
    for begin in range(0, len(text) - run + 1, run):  # Each run of twice the length contains such a block.
        block = text[begin : begin + run]
        words = block.split(None, 1)
        if not words or len(words[0]) == len(block):
            return f"has more than {run} characters without a boundary between words. Divide it"
    return ""


def tokens_answered_max(max_model_len: int) -> int:
    """Tokens that an engine's server makes of one text, at most."""
    return max(TOKENS_ANSWERED_MIN, max_model_len + 1)


def joined(pieces: Iterable[str], chars_max: int) -> str:
    """The text of pieces that are still being made. Raises TextTooLong as soon as there are too many of them."""
    made: list[str] = []
    left = chars_max
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise TextTooLong(f"the chat template makes more than {chars_max} characters of these messages")
        made.append(piece)
    return "".join(made)


class BodyMeter:
    """Counts objects, arrays, fields and values of JSON that arrives in pieces. Exact up to the first error of syntax,
    after which no parser reads.
    """

    __slots__ = ("_escaped", "_in_string", "fields", "values")

    def __init__(self) -> None:
        self.fields = 0
        self.values = 0
        self._in_string = False
        self._escaped = False
        """The piece before ended with a backslash that belongs to the next byte."""

    def add(self, piece: bytes) -> None:
        """The next piece."""
        if self._escaped:
            piece = b"\\" + piece
        self._escaped = False
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                self._escaped, piece = True, piece[:-1]
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.fields += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        self.values += outside.count(b",")

    @property
    def fault(self) -> str:
        """What is beyond its limit, as the end of a sentence; empty when nothing is."""
        if self.fields > FIELDS_MAX:
            return f"has more than {FIELDS_MAX} objects, arrays and fields"
        return f"has more than {VALUES_MAX} values" if self.values > VALUES_MAX else ""


def body_fault(body: bytes) -> str:
    """What makes the body too costly to read, as the end of a sentence; empty when nothing does. Holds the GIL for
    ``STEP_BYTES`` at a time.
    """
    if b"\x00" in body[:4] or body[:2] in BYTE_ORDER_MARKS:
        return "is not encoded in UTF-8"
    if len(body) <= HARMLESS_BYTES_MAX or _has_little_structure(body):
        return ""
    meter = BodyMeter()
    for begin in range(0, len(body), STEP_BYTES):
        meter.add(body[begin : begin + STEP_BYTES])
        if fault := meter.fault:
            return fault
    return ""


def _has_little_structure(body: bytes) -> bool:
    """Whether the body would be within the limits even if nothing in it were text: many times as fast to see."""
    fields = values = 0
    whole = np.frombuffer(body, np.uint8)
    for begin in range(0, len(body), STEP_BYTES):
        part = whole[begin : begin + STEP_BYTES]
        opened = (part | BRACKET_BIT) == ord("{")
        fields += int(np.count_nonzero(opened)) + int(np.count_nonzero(part == ord(":")))
        values += int(np.count_nonzero(part == ord(",")))
        if fields > FIELDS_MAX or values > VALUES_MAX:
            return False
    return True


def withheld_message(name: str) -> str:
    """What to tell the client that has set a field of ``WITHHELD``."""
    return f"`{name}` is not taken: {WITHHELD[name]}."


def first_reserved(variables: Any) -> str:
    """The first name in ``chat_template_kwargs`` that a client must not set; empty when there is none. The engine
    reports what else is wrong with them.
    """
    return next(filter(_is_reserved, variables), "") if isinstance(variables, dict) else ""


def no_threshold_message(who: str) -> str:
    """Why a request with ``cache_hit_threshold`` is not served by ``who``."""
    return (
        f"{who} cannot refuse a request by what is cached: only workers with Baton's KV exchange can "
        "(WORKER_CONNECTOR=baton). Leave `cache_hit_threshold` out."
    )


def reserved_message(name: str) -> str:
    """What to tell the client that has set it."""
    return f"`chat_template_kwargs` must not set `{name[:64]}`, which belongs to the model or to the template engine."


def reserved_in(body: bytes) -> str:
    """``first_reserved`` of a whole body, read as leniently as engines do."""
    try:
        return first_reserved(_fields.decode(_fields.decode(body).get("chat_template_kwargs", b"null")))
    except msgspec.ValidationError:
        return ""  # They, or the body, are no object.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return first_reserved(value.get("chat_template_kwargs")) if isinstance(value, dict) else ""


def _is_reserved(name: str) -> bool:
    if name in TEMPLATE_NAMES or name in RENDERING_ARGUMENTS:
        return True
    return name.endswith(SPECIAL_NAME_END) and not name.startswith(FLAG_PREFIX)
