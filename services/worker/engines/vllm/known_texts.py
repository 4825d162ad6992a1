"""The tokens of prompts without tokenizing again what earlier prompts contained.

A conversation's next turn repeats its history, and vLLM tokenizes all of it again, on the prefill and on the decode
worker, before the engine hears of the request: 1.4 ms for 1,000 tokens. A text's tokens are those of its pieces
(``shared.text_cuts``), so the tokens of pieces are kept: for each cache salt apart, since how long a prompt takes tells
what is kept.

Only for prompts of legs: routers have workers tokenize probes to find out whether their own pieces are right.
"""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from collections import OrderedDict
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from services.worker.engines.port import CURRENT_LEG
from shared.text_cuts import PIECE_CHARS, PIECE_CHARS_MAX, find_cuts, special_tokens
from shared.third_party import CONTAINED

TEXT_CHARS_MIN = 2048
"""Shorter texts take vLLM less than a millisecond."""
BYTES_MAX = 64 << 20
"""Maximum memory of the pieces and their tokens: some seven million tokens."""
PIECE_BYTES = 250
"""Memory of a piece besides its text and tokens."""
SAMPLE = "It's 3.14159, l'été — 漢字とかな, привет 🙂!\n\n\tdef f(x):\n\t    return x  **  2\r\n" * 24

log = logging.getLogger("baton.worker")


class PieceTokens:
    """Tokens of texts, piece by piece. Thread-safe. Raises ValueError for a tokenizer whose texts have no pieces."""

    def __init__(
        self, tokenizer: Tokenizer, hint: str = "", *, bytes_max: int = BYTES_MAX, piece_chars: int = PIECE_CHARS
    ) -> None:
        """``hint``: see ``find_cuts``. The tokenizer is changed."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._cuts = find_cuts(tokenizer, hint)
        self._before, self._after = special_tokens(tokenizer)
        self._piece_chars = piece_chars
        self._bytes_max, self._bytes = bytes_max, 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        """Tokens by salt and piece, the least recently used first."""
        self._lock = threading.Lock()

    def tokens(self, text: str, *, special: bool, salt: str = "") -> list[int] | None:
        """Tokens of the text; ``special``: with those that the tokenizer adds. None: it cannot be cut well enough."""
        pieces = self._pieces(text)
        if pieces is None:
            return None
        found = {piece: known for piece in pieces if (known := self._recalled(salt, piece)) is not None}
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in found]
        if missing:
            with CONTAINED:
                encoded = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
            found.update((piece, self._kept(salt, piece, one.ids)) for piece, one in zip(missing, encoded, strict=True))
        tokens = list(chain.from_iterable(found[piece] for piece in pieces))
        return [*self._before, *tokens, *self._after] if special else tokens

    def _pieces(self, text: str) -> list[str] | None:
        """Each as it is tokenized; None if one is too long."""
        pieces, at, chars = list[str](), 0, self._piece_chars
        while at < len(text):
            end = self._cuts.end(text, at, chars)
            if end - at > PIECE_CHARS_MAX:
                return None
            drops_space = at and self._cuts.drops_space and text[at] == " "
            pieces.append(text[at + 1 : end] if drops_space else text[at:end])
            at = end
        return pieces

    def _recalled(self, salt: str, piece: str) -> array[int] | None:
        with self._lock:
            tokens = self._known.get((salt, piece))
            if tokens is not None:
                self._known.move_to_end((salt, piece))
            return tokens

    def _kept(self, salt: str, piece: str, ids: list[int]) -> array[int]:
        tokens = array("I", ids)
        with self._lock:
            if (salt, piece) not in self._known:
                self._known[salt, piece] = tokens
                self._bytes += _size(piece, tokens)
            while self._bytes > self._bytes_max:
                (_salt, oldest), its_tokens = self._known.popitem(last=False)
                self._bytes -= _size(oldest, its_tokens)
        return tokens


def _size(piece: str, tokens: array[int]) -> int:
    return PIECE_BYTES + sys.getsizeof(piece) + tokens.itemsize * len(tokens)


def reuse_tokens(renderer: Any, chat_template: str) -> None:
    """From now on this renderer tokenizes the prompts of legs so. Call before the first request. ``chat_template``: the
    operator's, if there is one. A tokenizer that does not agree with its own pieces stays as it is.
    """
    from vllm.renderers.base import BaseRenderer
    from vllm.utils.async_utils import make_async

    from services.worker.engines.vllm.tokenizer import tokenizer_files

    files = tokenizer_files(renderer.tokenizer, chat_template)
    if not files.tokenizer_json or type(renderer)._tokenize_prompt is not BaseRenderer._tokenize_prompt:
        return
    try:
        hint = " ".join([*files.special_tokens.values(), files.chat_template])
        known = PieceTokens(Tokenizer.from_str(files.tokenizer_json.decode()), hint)
    except ValueError as error:
        log.info("prompts are tokenized anew each time: %s", error)
        return
    for special in (False, True):
        if known.tokens(SAMPLE, special=special) != renderer.tokenizer(SAMPLE, add_special_tokens=special)["input_ids"]:
            log.info("prompts are tokenized anew each time: vLLM's tokens differ from those of tokenizer.json")
            return
    whole, whole_async = renderer._tokenize_prompt, renderer._tokenize_prompt_async

    def tokenize(prompt: Any, params: Any, salt: str) -> Any:
        asked = params.get_encode_kwargs()
        tokens = known.tokens(prompt["prompt"], special=bool(asked["add_special_tokens"]), salt=salt)
        if tokens is None or (asked["truncation"] and len(tokens) > asked["max_length"]):
            return whole(prompt, params)
        return renderer._build_tokens_prompt(tokens, prompt)

    in_thread = make_async(tokenize, executor=renderer._executor)

    async def tokenize_async(prompt: Any, params: Any) -> Any:
        leg = CURRENT_LEG.get()
        if leg is None or len(prompt["prompt"]) < TEXT_CHARS_MIN or renderer._wants_offsets(prompt, params):
            return await whole_async(prompt, params)
        return await in_thread(prompt, params, leg.input.cache_salt)

    renderer._tokenize_prompt_async = tokenize_async
