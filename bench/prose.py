"""Prompts that read like prose and differ from their first words on, so that no cache has a block of another one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

from services.worker.tiny_model import CORPUS

TOKENS_PER_WORD = 1.39
"""Of baton-tiny's tokenizer, names, numbers and marks included."""
SENTENCE_WORDS = (6, 22)
NAME_SHARE, NUMBER_SHARE, COMMA_SHARE = 0.03, 0.02, 0.08
"""Of the words."""
PARAGRAPH_SENTENCES = 6
ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "w")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
ENDS = ("", "l", "n", "r", "s", "th", "nd", "rk")


class Prose:
    """Sentences of the words of Baton's own corpus, as frequent as there, with names and numbers between them."""

    def __init__(self, seed: object) -> None:
        """Equal seeds, equal texts."""
        self._draw = random.Random(str(seed))
        counted = Counter(word for word in CORPUS.read_text(encoding="utf-8").lower().split() if word.isalpha())
        self._words = sorted(counted)
        self._cumulated = list(accumulate(counted[word] for word in self._words))

    def text(self, tokens: int) -> str:
        """The next text, of so many tokens, about."""
        left = max(1, round(tokens / TOKENS_PER_WORD))
        parts: list[str] = []
        while left > 0:
            count = min(left, self._draw.randint(*SENTENCE_WORDS))
            left -= count
            parts.append(self._sentence(count))
        starts = range(0, len(parts), PARAGRAPH_SENTENCES)
        return "\n\n".join(" ".join(parts[at : at + PARAGRAPH_SENTENCES]) for at in starts)

    def _sentence(self, count: int) -> str:
        words = self._draw.choices(self._words, cum_weights=self._cumulated, k=count)
        for at in range(count):
            kind = self._draw.random()
            if kind < NAME_SHARE:
                words[at] = self._name()
            elif kind < NAME_SHARE + NUMBER_SHARE:
                words[at] = str(self._draw.randrange(3000))
            elif kind < NAME_SHARE + NUMBER_SHARE + COMMA_SHARE and at < count - 1:
                words[at] += ","
        words[0] = words[0].capitalize()
        return " ".join(words) + "."

    def _name(self) -> str:
        draw = self._draw
        syllables = (draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(draw.randint(1, 3)))
        return ("".join(syllables) + draw.choice(ENDS)).capitalize()
