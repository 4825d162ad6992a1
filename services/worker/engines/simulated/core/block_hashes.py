"""Block hashes as vLLM computes them with ``sha256_cbor``: a chain over the tokens of full blocks.

The CBOR is put together from ready-made pieces, which is three times as fast as a general encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import cbor2

SEED = "vllm-none-hash"
ROOT_HASH: bytes = hashlib.sha256(cbor2.dumps(SEED, canonical=True)).digest()
"""The parent of a first block."""

_THREE_AND_PARENT = b"\x83\x58\x20"
"""An array of three begins, its first a byte string of 32."""
_NO_EXTRA_KEYS = b"\xf6"


class BlockHasher:
    """Hashes blocks of one size whose tokens are below ``vocabulary``."""

    def __init__(self, block_size: int, vocabulary: int) -> None:
        self.block_size = block_size
        self._packed_token = _packed_tokens(vocabulary).__getitem__
        self._array_head = cbor2.dumps([0] * block_size)[:-block_size]

    def extend(self, hashes: list[bytes], tokens: Sequence[int], salt: str = "") -> None:
        """Append to ``hashes``, the chain of the first blocks of ``tokens``, those of its further full blocks.

        ``salt`` keeps the blocks of those who have different ones apart.
        """
        size = self.block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            extra = _salted(salt) if salt and not start else _NO_EXTRA_KEYS
            parent = self._block(parent, tokens[start : start + size], extra)
            hashes.append(parent)

    def _block(self, parent: bytes, tokens: Sequence[int], extra_keys: bytes) -> bytes:
        packed = b"".join(map(self._packed_token, tokens))
        return hashlib.sha256(_THREE_AND_PARENT + parent + self._array_head + packed + extra_keys).digest()


@cache
def _packed_tokens(vocabulary: int) -> list[bytes]:
    """One table for all engines of a model: a replay runs a thousand of them."""
    return [cbor2.dumps(token) for token in range(vocabulary)]


def _salted(salt: str) -> bytes:
    return cbor2.dumps((("cache_salt", salt),), canonical=True)
