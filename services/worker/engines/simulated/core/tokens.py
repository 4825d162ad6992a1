"""What the simulated model computes: the content of a KV block, and the next token from all contents held.

The content stands for keys and values: a number that depends on the block's tokens and on the content of the block
before it. The next token is a function of the contents that the sequence holds at that moment, read anew for each token
as attention does: a wrong, missing or recycled block changes every token after it. Sampling parameters change nothing.

``hash`` of integers and tuples of integers is not randomised and is the same on every 64-bit CPython of this version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT_CONTENT = 0x6A09E667F3BCC908
"""Content before the first block."""
EOS_PERIOD = 256
"""One token in so many ends the answer, unless the request ignores that."""

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def block_content(previous: int, tokens: Sequence[int]) -> int:
    """The content of a block, full or not, that holds ``tokens`` after a block whose content is ``previous``."""
    return hash((previous, tuple(tokens)))


class TokenSampler:
    """Chooses among the ids of the vocabulary and ``eos``; never other special tokens."""

    def __init__(self, vocabulary: Sequence[int], eos: int | None) -> None:
        if not vocabulary:
            raise ValueError("a model needs at least one token that it can generate")
        self._vocabulary = vocabulary
        self._size = len(vocabulary)
        self._eos = eos

    def next_token(self, contents: Iterable[int], *, may_end: bool) -> int:
        """The token that follows from the contents of all blocks of a sequence, in their order."""
        drawn = ((hash(tuple(contents)) * _MIX) & _MASK) >> 24
        if may_end and self._eos is not None and drawn % EOS_PERIOD == 0:
            return self._eos
        return self._vocabulary[(drawn >> 8) % self._size]
