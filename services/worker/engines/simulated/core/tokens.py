"""What the simulated model computes: contents of KV blocks and tokens; and block hashes as vLLM computes them.

A block's content is a number that stands for keys and values. It depends on the block's tokens and on the content of
the block before it. The next token is a function of the contents of all blocks of the sequence, which are read again
for each token, as attention does: a wrong, missing or recycled block changes every token after it. Sampling parameters
have no effect. ``hash`` of integers and tuples of integers is not randomised, and equal on all 64-bit CPythons of one
version.

Block hashes are vLLM's ``sha256_cbor``: a chain over the tokens of full blocks. The CBOR is assembled from prepared
pieces, which is three times as fast as a general encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache

import cbor2

ROOT_CONTENT = 0x6A09E667F3BCC908
"""The content that precedes the first block."""
EOS_PERIOD = 256
"""One token in this many is the end token, unless the request ignores it."""

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

SEED = "vllm-none-hash"
ROOT_HASH: bytes = hashlib.sha256(cbor2.dumps(SEED, canonical=True)).digest()
"""Parent hash of a first block."""
_THREE_AND_PARENT = b"\x83\x58\x20"
"""CBOR: begins an array of three items, of which the first is a byte string of 32 bytes."""
_NO_EXTRA_KEYS = b"\xf6"


def root_content(adapter: tuple[str, str] | None) -> int:
    """What precedes the first block of a request, with or without a LoRA adapter: an adapter changes all content."""
    if adapter is None:
        return ROOT_CONTENT
    return int.from_bytes(hashlib.sha256(repr(adapter).encode()).digest()[:7], "big")


def block_content(previous: int, tokens: Sequence[int]) -> int:
    """The content of a block, full or not, that holds ``tokens`` after a block whose content is ``previous``."""
    return hash((previous, tuple(tokens)))


def kept_content(full: int, group: int) -> int:
    """What another group than that of full attention keeps at the end of a block whose content is ``full``."""
    return hash((full, -group))


class TokenSampler:
    """Chooses among the given ids and ``eos``."""

    def __init__(self, vocabulary: Sequence[int], eos: int | None) -> None:
        if not vocabulary:
            raise ValueError("a model needs at least one token that it can generate")
        self._vocabulary = vocabulary
        self._size = len(vocabulary)
        self._eos = eos

    def next_token(self, contents: Iterable[int], *, may_end: bool) -> int:
        """The token that follows a sequence whose blocks have these contents, in order."""
        drawn = ((hash(tuple(contents)) * _MIX) & _MASK) >> 24
        if may_end and self._eos is not None and drawn % EOS_PERIOD == 0:
            return self._eos
        return self._vocabulary[(drawn >> 8) % self._size]


class BlockHasher:
    """Hashes blocks of one size whose tokens are below ``vocabulary``."""

    def __init__(self, block_size: int, vocabulary: int) -> None:
        self.block_size = block_size
        self._packed_token = _packed_tokens(vocabulary).__getitem__
        self._array_head = cbor2.dumps([0] * block_size)[:-block_size]

    def extend(
        self, hashes: list[bytes], tokens: Sequence[int], salt: str = "", adapter: tuple[str, str] | None = None
    ) -> None:
        """``hashes`` are the hashes of the first blocks of ``tokens``. Append those of its further full blocks.

        Sequences with different salts or LoRA adapters share no block.
        """
        size = self.block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            extra = _extra_keys("" if start else salt, adapter)
            parent = self._block(parent, tokens[start : start + size], extra)
            hashes.append(parent)

    def _block(self, parent: bytes, tokens: Sequence[int], extra_keys: bytes) -> bytes:
        packed = b"".join(map(self._packed_token, tokens))
        return hashlib.sha256(_THREE_AND_PARENT + parent + self._array_head + packed + extra_keys).digest()


@cache
def _packed_tokens(vocabulary: int) -> list[bytes]:
    """One table for all engines of a model: a process may run a thousand of them."""
    return [cbor2.dumps(token) for token in range(vocabulary)]


def _extra_keys(salt: str, adapter: tuple[str, str] | None) -> bytes:
    if not salt and adapter is None:
        return _NO_EXTRA_KEYS
    keys = (("lora", *adapter),) if adapter is not None else ()
    return cbor2.dumps((*keys, *((("cache_salt", salt),) if salt else ())), canonical=True)
