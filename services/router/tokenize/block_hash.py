"""The engine's block hashes of a prompt, computed without the engine.

vLLM identifies a full block by ``sha256(cbor((parent hash, token ids, extra keys)))``, chained. The canonical CBOR of
that tuple is assembled here from precomputed pieces, several times faster than with a general encoder; property tests
compare the two.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from shared.contracts.kv_events import block_hash64
from shared.contracts.workers import HashScheme

ALGORITHMS: Final = frozenset({"sha256_cbor"})
"""Hash algorithms that the router computes; a worker with another one is placed by load alone."""

TOKEN_PIECES_MAX: Final = 1 << 19
"""The CBOR bytes of token ids below this are cached; larger than any vocabulary in use."""

ARRAY_OF_THREE: Final = b"\x83"
HASH_PREFIX: Final = b"\x58\x20"
NULL: Final = b"\xf6"
TOKEN: Final = re.compile(rb"[\x00-\x17]|\x18.|\x19..|\x1a.{4}|\x1b.{8}", re.DOTALL)
"""A token id in CBOR."""
Extend = Callable[[bytes, bytes, int, bytes, bytes], tuple[list[int], bytes, int, bytes]]
"""The type of ``extend_in_python``."""


class HashKeys(NamedTuple):
    """What is hashed into the blocks of a request beside its tokens."""

    salt: str = ""
    """The tenant's salt, which the first block's hash has."""
    adapter: tuple[str, str] | None = None
    """The LoRA adapter, which every block's hash has: its name, and what stands for its files (see
    ``LoraAdapter.hashed_as``).
    """


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


def extra_keys(*, salt: str = "", adapter: tuple[str, str] | None = None, first: bool) -> bytes:
    """CBOR of a block's extra keys: the adapter on every block, the salt on the first one only."""
    keys: list[bytes] = []
    if adapter is not None:
        keys.append(ARRAY_OF_THREE + b"".join(cbor_text(part) for part in ("lora", *adapter)))
    if salt and first:
        keys.append(b"\x82" + cbor_text("cache_salt") + cbor_text(salt))
    if not keys:
        return NULL
    return cbor_head(4, len(keys)) + b"".join(keys)


def extend_chain(
    parent: bytes | None,
    tokens: Sequence[int],
    scheme: HashScheme,
    *,
    salt: str = "",
    adapter: tuple[str, str] | None = None,
) -> tuple[list[int], bytes | None]:
    """The hashes of the full blocks of ``tokens`` after the block whose full hash is ``parent`` (None: the first
    block), and the full hash of the last one.
    """
    hashes, digest, _count, _rest = extend_packed(parent, pack(tokens), scheme, salt=salt, adapter=adapter)
    return hashes, digest


def pack(tokens: Iterable[int]) -> bytes:
    """The CBOR of token ids, one after the other."""
    return b"".join(map(PIECES.__getitem__, tokens))


def extend_packed(
    parent: bytes | None, packed: bytes, scheme: HashScheme, *, salt: str = "", adapter: tuple[str, str] | None = None
) -> tuple[list[int], bytes | None, int, bytes]:
    """Like ``extend_chain``, for tokens as ``pack`` makes them. Also returns their number, and those after the last
    full block. Raises ValueError for other bytes.
    """
    later = _later_keys(adapter)
    first = extra_keys(salt=salt, adapter=adapter, first=True) if parent is None else later
    before = seed_hash(scheme.seed) if parent is None else parent
    hashes, digest, count, rest = _extend(before, packed, scheme.block_size, first, later)
    return hashes, digest if hashes else parent, count, rest


@lru_cache(maxsize=64)
def _later_keys(adapter: tuple[str, str] | None) -> bytes:
    """The keys of all blocks but the first."""
    return extra_keys(adapter=adapter, first=False)


def goes_on(hashes: Sequence[int], stride: int, held: Callable[[int], bool]) -> bool:
    """Whether some worker may hold a prompt beyond these hashes: it holds the last one of them that names a
    full-attention block, of which each has ``stride`` hashes (0: there are none).
    """
    full = len(hashes) // stride * stride if stride else 0
    return full == 0 or held(hashes[full - 1])


def extend_in_python(
    parent: bytes, packed: bytes, block_size: int, first_keys: bytes, keys: bytes
) -> tuple[list[int], bytes, int, bytes]:
    """As ``native/hash_chain.c``, which takes less than a tenth of the time."""
    tokens = TOKEN.findall(packed)
    if sum(map(len, tokens)) != len(packed):
        raise ValueError("these bytes are no token ids in CBOR")
    sha256, join, head = hashlib.sha256, b"".join, cbor_head(4, block_size)
    full = len(tokens) - len(tokens) % block_size
    hashes: list[int] = []
    for begin in range(0, full, block_size):
        some = join(tokens[begin : begin + block_size])
        parent = sha256(ARRAY_OF_THREE + HASH_PREFIX + parent + head + some + (keys if begin else first_keys)).digest()
        hashes.append(block_hash64(parent))
    return hashes, parent, len(tokens), join(tokens[full:])


def fastest_extend() -> Extend:
    """In C, where that is built and finds the OpenSSL that Python's hashlib uses."""
    in_library = getattr(hashlib.sha256, "__self__", None)
    try:
        from services.router.native import _tokenize

        _tokenize.open_library(getattr(in_library, "__file__", ""))  # "": it is part of the program
    except ImportError:
        return extend_in_python
    return _tokenize.extend_chain


_extend: Final = fastest_extend()
