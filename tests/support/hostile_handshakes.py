"""Handshakes and NIXL metadata that no honest worker sends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shared.contracts.kv_exchange import KvHandshake

AGENT_NAME = b"|Agent"
"""What precedes the length of the agent's name, of eight bytes, in its metadata."""
MEMORY_TYPE = b"|t" + (4).to_bytes(8, "little")
"""What precedes the type of the memory, an integer of four bytes."""

PIECE_LENGTH = (35).to_bytes(8, "little")
KEY_BYTES = 11
"""Of a piece of CPU memory where UCX uses one kind of key, as on a machine without RDMA and GPU."""


def with_metadata(honest: KvHandshake, metadata: bytes) -> KvHandshake:
    return with_rank(honest, agent=metadata)


def with_rank(honest: KvHandshake, **fields: Any) -> KvHandshake:
    return replace(honest, ranks=[replace(rank, **fields) for rank in honest.ranks])


def with_layer(honest: KvHandshake, **fields: int) -> KvHandshake:
    first, *others = honest.ranks[0].layers
    return with_rank(honest, layers=[replace(first, **fields), *others])


def deadly(metadata: bytes) -> bytes:
    """NIXL looks the memory's type up in an array: this one is far before its beginning."""
    before, after = metadata.split(MEMORY_TYPE, 1)
    return before + MEMORY_TYPE + (1 << 31).to_bytes(4, "little") + after[4:]


def without_utf8(metadata: bytes) -> bytes:
    """The name of the agent is none in UTF-8."""
    first = metadata.index(AGENT_NAME) + len(AGENT_NAME) + 8
    return metadata[:first] + b"\xff" + metadata[first + 1 :]


FORGERIES: dict[str, tuple[Callable[[KvHandshake], KvHandshake], str]] = {
    "device": (lambda honest: with_rank(honest, device="xpu"), "device is 'xpu'"),
    "device-id": (lambda honest: with_rank(honest, device_id=-1), "device_id is -1"),
    "base": (lambda honest: with_layer(honest, base=-1), "base is -1"),
    "stride": (lambda honest: with_layer(honest, block_stride=-1), "block_stride is -1"),
    "utf8": (lambda honest: with_metadata(honest, without_utf8(honest.ranks[0].agent)), "UnicodeDecodeError"),
    "deadly": (lambda honest: with_metadata(honest, deadly(honest.ranks[0].agent)), "ends a process"),
}
"""Each made of an honest one, and what names its fault."""


def with_random_key(metadata: bytes, seed: str) -> bytes:
    """UCX's key of one piece of memory, by which it is read, is replaced; it ends an entry of the list of pieces."""
    rng = random.Random(seed)
    length = len(PIECE_LENGTH) + int.from_bytes(PIECE_LENGTH, "little")
    ends = [at + length for at in range(len(metadata)) if metadata[at:].startswith(PIECE_LENGTH)]
    end = rng.choice([end for end in ends if end <= len(metadata)])
    return metadata[: end - KEY_BYTES] + rng.randbytes(KEY_BYTES) + metadata[end:]


def mutated(metadata: bytes, seed: str) -> bytes:
    """Flipped bits, other bytes, a missing end, or 32 random bytes."""
    rng, changed = random.Random(seed), bytearray(metadata)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.choice([1, 1, 2, 4, 8])):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(rng.choice([1, 1, 2, 4, 8])):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        case 2:
            del changed[rng.randrange(len(changed)) :]
        case _:
            first = rng.randrange(len(changed))
            changed[first : first + 32] = rng.randbytes(len(changed[first : first + 32]))
    return bytes(changed)
