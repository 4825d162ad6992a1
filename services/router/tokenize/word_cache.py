"""Text to tokens, word by word: what a word becomes is remembered, so that most of a new text is looked up.

In the time in which a tokenizer reads a text, ten times as much can be cut at its words and looked up. Tokens are kept
as what block hashes are made of: the CBOR of their ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import cast

from tokenizers import Tokenizer

from services.router.tokenize.block_hash import PIECES
from services.router.tokenize.text_cuts import Cuts, cut_words

WORDS_MAX = 1 << 16
"""Words remembered beside the vocabulary's own; beyond that, all of those are forgotten."""
WORD_CHARS_MAX = 256
"""Of a word that is remembered."""
VOCABULARY_WORDS_MAX = 1 << 16
WORDS_AT_ONCE = 1024
"""Words of the vocabulary that are tokenized in one call."""
VOCABULARY_WORD = re.compile("[\u2581\u0120]?([A-Za-z]+)")
"""With one of the marks that tokenizers make of the space before a word."""

Packed = tuple[bytes, ...]

# One prompt's words are not worth all of the machine's processors: the router has one thread for them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class PackedWords:
    """One tokenizer's. Calls from two threads at a time are safe: whatever they remember is the same."""

    def __init__(self, tokenizer: Tokenizer, cuts: Cuts) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._own = self._vocabulary() if cuts.words is not None else {}
        """Words of the vocabulary: most words of most texts."""
        self._words = dict(self._own)

    def tokenize(self, texts: Sequence[str]) -> list[list[bytes]]:
        """The packed tokens of each of some pieces of text, without special tokens around them."""
        if self._cuts.words is None:
            return list(map(list, self._encode(texts)))
        recall = self._words.get
        pieces = [cut_words(self._cuts, text) for text in texts]
        recalled = [list(map(recall, words)) for words in pieces]
        unknown = [(n, at) for n, known in enumerate(recalled) for at, packed in enumerate(known) if packed is None]
        if unknown:
            missing = list({pieces[n][at] for n, at in unknown})
            found = dict(zip(missing, self._encode(missing), strict=True))
            for n, at in unknown:
                recalled[n][at] = found[pieces[n][at]]
            self._remember(found)
        return [list(chain.from_iterable(cast("list[Packed]", packed))) for packed in recalled]

    def _remember(self, found: dict[str, Packed]) -> None:
        if len(self._words) > len(self._own) + WORDS_MAX:
            self._words = dict(self._own)
        self._words.update((word, packed) for word, packed in found.items() if len(word) <= WORD_CHARS_MAX)

    def _vocabulary(self) -> dict[str, Packed]:
        space = "" if self._cuts.drops_space else " "
        matches = map(VOCABULARY_WORD.fullmatch, self._tokenizer.get_vocab(with_added_tokens=False))
        words = iter({space + match[1]: None for match in matches if match is not None})
        own: dict[str, Packed] = {}
        while len(own) < VOCABULARY_WORDS_MAX and (some := list(islice(words, WORDS_AT_ONCE))):
            own.update(zip(some, self._encode(some), strict=True))
        return own

    def _encode(self, texts: Sequence[str]) -> list[Packed]:
        packed = PIECES.__getitem__
        encoded: Iterable[object] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [tuple(map(packed, one.ids)) for one in encoded]  # type: ignore[attr-defined]
