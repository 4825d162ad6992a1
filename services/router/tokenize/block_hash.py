"""The engine's block hashes of a prompt, computed without the engine.

vLLM identifies a full block by ``sha256(cbor((parent hash, token ids, extra keys)))``, chained. The canonical CBOR of
that tuple is assembled here from precomputed pieces, several times faster than with a general encoder; property tests
compare the two.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from shared.contracts.kv_events import BLOCK_HASH_BYTES, unpack_hashes
from shared.contracts.workers import HashScheme

ALGORITHMS: Final = frozenset({"sha256_cbor"})
"""Hash algorithms that the router computes; a worker with another one is placed by load alone."""

TOKEN_PIECES_MAX: Final = 1 << 19
"""The CBOR bytes of token ids below this are cached; larger than any vocabulary in use."""

ARRAY_OF_THREE: Final = b"\x83"
HASH_PREFIX: Final = b"\x58\x20"
NULL: Final = b"\xf6"


class HashKeys(NamedTuple):
    """What is hashed into the blocks of a request beside its tokens."""

    salt: str = ""
    """The tenant's, in the first block."""
    lora: tuple[str, str] | None = None
    """The LoRA adapter, in every block: its name, and what stands for its files (``LoraAdapter.hashed_as``)."""


NO_KEYS: Final = HashKeys()


def cbor_head(major: int, value: int) -> bytes:
    """The shortest head of a CBOR item, as canonical CBOR requires."""
    kind = major << 5
    if value < 24:
        return bytes((kind | value,))
    if value < 1 << 8:
        return bytes((kind | 24, value))
    if value < 1 << 16:
        return struct.pack(">BH", kind | 25, value)
    if value < 1 << 32:
        return struct.pack(">BI", kind | 26, value)
    return struct.pack(">BQ", kind | 27, value)


def cbor_text(text: str) -> bytes:
    """A CBOR text string."""
    raw = text.encode()
    return cbor_head(3, len(raw)) + raw


class TokenPieces(dict[int, bytes]):
    """Token id -> its CBOR bytes, filled on first use."""

    def __missing__(self, token: int) -> bytes:
        piece = cbor_head(0, token)
        if token < TOKEN_PIECES_MAX:
            self[token] = piece
        return piece


PIECES: Final = TokenPieces()


@lru_cache(maxsize=16)
def seed_hash(seed: str) -> bytes:
    """The parent of every first block."""
    return hashlib.sha256(cbor_text(seed)).digest()


def extra_keys(*, salt: str = "", lora: tuple[str, str] | None = None, first: bool) -> bytes:
    """CBOR of a block's extra keys: the adapter on every block, the salt on the first one only."""
    keys: list[bytes] = []
    if lora is not None:
        keys.append(ARRAY_OF_THREE + b"".join(cbor_text(part) for part in ("lora", *lora)))
    if salt and first:
        keys.append(b"\x82" + cbor_text("cache_salt") + cbor_text(salt))
    if not keys:
        return NULL
    return cbor_head(4, len(keys)) + b"".join(keys)


def block_hashes(
    tokens: Sequence[int], scheme: HashScheme, *, salt: str = "", lora: tuple[str, str] | None = None
) -> list[int]:
    """The 64-bit hash of every full block of ``tokens``, first block first."""
    return extend_chain(None, tokens, scheme, salt=salt, lora=lora)[0]


def extend_chain(
    parent: bytes | None,
    tokens: Sequence[int],
    scheme: HashScheme,
    *,
    salt: str = "",
    lora: tuple[str, str] | None = None,
) -> tuple[list[int], bytes | None]:
    """The hashes of the full blocks of ``tokens`` behind the block whose full hash is ``parent`` (None: the first
    block), and the full hash of the last one.
    """
    full = len(tokens) - len(tokens) % scheme.block_size
    return extend_packed(parent, list(map(PIECES.__getitem__, tokens[:full])), scheme, salt=salt, lora=lora)


def extend_packed(
    parent: bytes | None,
    packed: Sequence[bytes],
    scheme: HashScheme,
    *,
    salt: str = "",
    lora: tuple[str, str] | None = None,
) -> tuple[list[int], bytes | None]:
    """Like ``extend_chain``, for tokens given as CBOR (see ``PIECES``)."""
    size = scheme.block_size
    full = len(packed) - len(packed) % size
    if full == 0:
        return [], parent
    sha256, join = hashlib.sha256, b"".join
    start, tokens_head, later = _frame(size, lora)
    tail = extra_keys(salt=salt, lora=lora, first=True) if parent is None else later
    digest = seed_hash(scheme.seed) if parent is None else parent
    digests: list[bytes] = []
    for begin in range(0, full, size):
        digest = sha256(start + digest + tokens_head + join(packed[begin : begin + size]) + tail).digest()
        digests.append(digest)
        tail = later
    shortened = join([full_hash[:BLOCK_HASH_BYTES] for full_hash in digests])
    return list(unpack_hashes(shortened)), digest


@lru_cache(maxsize=64)
def _frame(block_size: int, lora: tuple[str, str] | None) -> tuple[bytes, bytes, bytes]:
    """The bytes before the parent, before the tokens, and behind the tokens in all blocks but the first."""
    return ARRAY_OF_THREE + HASH_PREFIX, cbor_head(4, block_size), extra_keys(lora=lora, first=False)
