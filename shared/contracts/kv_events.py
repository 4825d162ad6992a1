"""What a worker's prefix cache holds, told as events with their own sequence numbers, and as a snapshot on demand.

A block's identity is the engine's chained hash; on the wire it is the first 8 bytes, big-endian. Lists of hashes are
packed one behind the other in one bytes field (see ``pack_hashes``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import StrEnum

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

BLOCK_HASH_BYTES = 8


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Unsigned 64-bit block hashes as bytes."""
    values = list(hashes)
    return struct.pack(f">{len(values)}Q", *values)


def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """The hashes in ``packed``. Raises ValueError when its length is no multiple of 8."""
    count, rest = divmod(len(packed), BLOCK_HASH_BYTES)
    if rest:
        raise ValueError(f"{len(packed)} bytes are not a whole number of {BLOCK_HASH_BYTES}-byte hashes")
    return struct.unpack(f">{count}Q", packed)


def block_hash64(full_hash: bytes) -> int:
    """The wire form of a full block hash: its first 8 bytes as an unsigned integer."""
    return int.from_bytes(full_hash[:BLOCK_HASH_BYTES], "big")


class KvTier(StrEnum):
    """Which memory of a worker a block lies in, the nearest first."""

    DEVICE = "device"
    """The engine's own KV cache: found at once."""
    HOST = "host"
    """The host's memory behind it: loaded before use."""
    DISK = "disk"


TIER_ROTATION_BITS = 21
"""Between one tier's hashes and the next one's in a digest, so that a block which moves between them changes it."""


def digest_xor(xors: Iterable[int]) -> int:
    """One number of the XOR of each tier's hashes, the nearest tier first (see ``KvDigest``)."""
    joined = 0
    for tier, xor in enumerate(xors):
        turn = tier * TIER_ROTATION_BITS
        joined ^= (xor << turn | xor >> (64 - turn)) & 0xFFFF_FFFF_FFFF_FFFF
    return joined


class KvEventKind(StrEnum):
    """vLLM's names."""

    STORED = "BlockStored"
    REMOVED = "BlockRemoved"
    CLEARED = "AllBlocksCleared"


class KvEvent(Message, frozen=True, kw_only=True):
    """One change of a worker's prefix cache. Storing a held block or removing an absent one changes nothing."""

    kind: KvEventKind
    hashes: bytes = b""
    tier: KvTier = KvTier.DEVICE
    """Which memory changed. CLEARED means all of them."""
    parent: int | None = None
    """STORED: hash of the block before the first one; None at the start of a chain."""


class KvEventBatch(Message, frozen=True, kw_only=True):
    """Worker -> routers: changes in order. ``seq`` counts batches from 1 in each epoch; a gap asks for a snapshot."""

    worker_id: WorkerId
    epoch: Epoch
    seq: int
    events: list[KvEvent]


class AskKvSnapshot(Message, frozen=True, kw_only=True):
    """Router -> worker: say all that you hold."""

    worker_id: WorkerId


class KvSnapshot(Message, frozen=True, kw_only=True):
    """Worker -> router: every block held after the batch numbered ``seq``."""

    worker_id: WorkerId
    epoch: Epoch
    seq: int
    hashes: bytes
    """In the device tier."""
    host_hashes: bytes = b""
    disk_hashes: bytes = b""


class KvDigest(Message, frozen=True, kw_only=True):
    """The prefix cache after the batch numbered ``seq``, in 16 bytes: to notice an index that went wrong."""

    seq: int
    count: int
    """Blocks, of all tiers; one that lies in two counts twice."""
    xor: int
    """XOR of all 64-bit hashes held, those in the host's memory rotated left by 21 bits, those on disk by 42."""
