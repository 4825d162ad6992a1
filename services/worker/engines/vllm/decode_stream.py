"""The text of an answer's first token, without decoding the whole prompt before it.

A token's text depends on the few tokens before it, so vLLM gives the prompt to the ``DecodeStream`` of tokenizers. That
decodes all of it before the first token, a microsecond per token on the front end's event loop, where every other
stream waits (vLLM 0.32; its pull requests 51281 and 57330 want to change that). ``TailDecodeStream`` gives it the
prompt's last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers.decoders
from tokenizers.decoders import DecodeStream

TAIL_TOKENS = 32
"""Tokens that are decoded again: more than the bytes of one character, and than the words that a decoder joins."""
INCOMPLETE = "\ufffd"
"""How a text ends if its last character has more bytes."""


class TailDecodeStream:
    """In place of ``DecodeStream``, with the same texts."""

    def __init__(self, ids: Sequence[int] | None = None, skip_special_tokens: bool = False) -> None:
        self._ids = ids or ()
        self._skip_special_tokens = skip_special_tokens
        self._stream: DecodeStream | None = None

    def step(self, tokenizer: Any, token: int) -> str | None:
        """The text that the next token adds, if it completes any."""
        if self._stream is None:
            tail = list(self._tail(tokenizer))
            self._stream = DecodeStream(ids=tail, skip_special_tokens=self._skip_special_tokens)
        return self._stream.step(tokenizer, token)

    def _tail(self, tokenizer: Any) -> Sequence[int]:
        """As much of the prompt's end as has a text (a decoder may treat the beginning of a text differently) that does
        not end within a character.
        """
        count = TAIL_TOKENS
        while count < len(self._ids):
            tail = self._ids[-count:]
            text = tokenizer.decode(tail, skip_special_tokens=self._skip_special_tokens)
            if text and not text.endswith(INCOMPLETE):
                return tail
            count *= 4
        return self._ids


def install() -> None:
    """For all requests of this process from now on: vLLM looks the class up in this module, so that others may put
    theirs there.
    """
    tokenizers.decoders.DecodeStream = TailDecodeStream  # type: ignore[misc, assignment]
