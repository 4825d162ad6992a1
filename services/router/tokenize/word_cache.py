"""Text to tokens, word by word: the tokens of each word are cached, so that most words of a new text are looked up.

Splitting a text into words and looking them up is ten times as fast as the tokenizer. Tokens are cached in the form
that block hashes are computed from: the CBOR of their ids.
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
"""Words cached in addition to those of the vocabulary; beyond that, all of them are dropped."""
WORD_CHARS_MAX = 256
"""Maximum length of a cached word."""
VOCABULARY_WORDS_MAX = 1 << 16
WORDS_AT_ONCE = 1024
"""Words of the vocabulary that are tokenized in one call."""
VOCABULARY_WORD = re.compile("[\u2581\u0120]?([A-Za-z]+)")
"""Optional mark that tokenizers use for the space before a word, and the word."""

Packed = tuple[bytes, ...]

# Without this, the tokenizers library uses every CPU for one prompt; the router tokenizes in one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class PackedWords:
    """The words of one tokenizer. Safe to call from two threads at a time: both would store the same tokens."""

    def __init__(self, tokenizer: Tokenizer, cuts: Cuts) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._own = self._vocabulary() if cuts.words is not None else {}
        """Words of the vocabulary, which are most words of most texts."""
        self._words = dict(self._own)

    def tokenize(self, texts: Sequence[str]) -> list[list[bytes]]:
        """The packed tokens of each text, without special tokens."""
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
