"""Prompts that were read before, so that the next turn of a conversation is read from its new part on.

A client sends the whole conversation each time. Its JSON begins with the same bytes then, up to the end of the last
message, or of the text: what a parser makes of the beginning of an array or a string does not depend on what follows.
It is compared instead of parsed, rendered and tokenized again.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import msgspec

from services.router.tokenize.message_loop import Dependencies
from services.router.tokenize.segments import Place

PROMPT_BYTES_COUNTED: Final = 2000
"""Memory of a prompt without its JSON, hashes and texts."""
NO_DEPENDENCIES: Final = Dependencies("", {}, {})
"""Of a prompt that is a text."""
HASH_BYTES_COUNTED: Final = 8
"""The numbers themselves are those of the tokenized pieces."""
EARLIER_TRIED: Final = 4
"""Prompts with the same beginning that are compared: branches of a conversation stand between it and another branch."""
SPACE: Final = b" \t\n\r"
QUOTE: Final = ord('"')

Kind = tuple[str, bytes]
"""What the text and its hashes depend on beside the messages: the tokenizer's root, and the template's variables, or
``OF_TEXT``.
"""
OF_TEXT: Final = b"text"
"""No variables are written so: what is sent as messages never goes on with a known text."""


class KnownPrompt(NamedTuple):
    """The prompt of one request."""

    raw: bytes
    """Its JSON up to the end of the last message, or of the text."""
    messages: int
    """0: it is a text."""
    head: list[dict[str, Any]]
    """See ``KnownChat``, and the next."""
    dependencies: Dependencies
    place: Place

    @property
    def chars(self) -> int:
        """Of the text that all prompts with this beginning have."""
        return self.place.chars + len(self.place.rest)

    @property
    def size(self) -> int:
        """In bytes."""
        texts = len(self.raw) + sys.getsizeof(self.place.rest) + 2 * sys.getsizeof(self.dependencies.before)
        texts += sum(sys.getsizeof(message["content"]) for message in self.head)
        return PROMPT_BYTES_COUNTED + texts + HASH_BYTES_COUNTED * len(self.place.hashes)


def without_end(json: msgspec.Raw | bytes) -> bytes:
    """The JSON of a string or an array, up to the end of its text or of its last element."""
    view = memoryview(json)
    if not view:
        return b""
    raw = bytes(view[:-1])
    return raw if view[-1] == QUOTE else raw.rstrip(SPACE)


def text_behind(known: KnownPrompt, raw: bytes) -> bytes:
    """The text that ``raw`` has behind the known one, as a string. ``raw``, here and below, is ``without_end``."""
    return b'"%b"' % raw[len(known.raw) :]


def messages_behind(known: KnownPrompt, raw: bytes) -> bytes:
    """The messages that ``raw`` has behind those that are known, as an array."""
    left = raw[len(known.raw) :].lstrip(SPACE)
    return b"[%b]" % left.removeprefix(b",")


class KnownPrompts:
    """By kind and JSON. Bounded in bytes: those that were not used for longest are forgotten. Safe to call from two
    threads at a time.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._sorted: dict[Kind, tuple[list[bytes], list[KnownPrompt]]] = {}
        """The JSON of each, and the prompts."""
        self._used: OrderedDict[int, tuple[Kind, KnownPrompt]] = OrderedDict()
        """By identity; those that were used last are last."""
        self._lock = threading.Lock()

    def find(self, kind: Kind, raw: bytes) -> KnownPrompt | None:
        """The longest one that this JSON begins with."""
        with self._lock:
            raws, prompts = self._sorted.get(kind, ([], []))
            behind = bisect_right(raws, raw)
            for at in range(behind - 1, max(behind - 1 - EARLIER_TRIED, -1), -1):
                if raw.startswith(raws[at]):
                    self._used.move_to_end(id(prompts[at]))
                    return prompts[at]
            return None

    def put(self, kind: Kind, prompt: KnownPrompt, known: KnownPrompt | None) -> None:
        """Remember a prompt, in the place of ``known``, which it goes on with."""
        with self._lock:
            if known is not None:
                self._remove(kind, known)
            raws, prompts = self._sorted.setdefault(kind, ([], []))
            at = bisect_left(raws, prompt.raw)
            if at < len(raws) and raws[at] == prompt.raw:
                self._remove(kind, prompts[at])
                raws, prompts = self._sorted.setdefault(kind, ([], []))
            raws.insert(at, prompt.raw)
            prompts.insert(at, prompt)
            self._used[id(prompt)] = kind, prompt
            self._bytes += prompt.size
            while self._bytes > self._bytes_max:
                _number, (kind, prompt) = next(iter(self._used.items()))
                self._remove(kind, prompt)

    def _remove(self, kind: Kind, prompt: KnownPrompt) -> None:
        """If it is still there."""
        if self._used.pop(id(prompt), None) is None:
            return
        raws, prompts = self._sorted[kind]
        at = bisect_left(raws, prompt.raw)
        del raws[at], prompts[at]
        if not raws:
            del self._sorted[kind]
        self._bytes -= prompt.size
