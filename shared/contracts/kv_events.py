"""The content of a worker's prefix cache: events with sequence numbers, and a snapshot on request.

A block's identity is the engine's chained hash; on the wire it is the first 8 bytes, big-endian. Lists of hashes are
concatenated in one bytes field (see ``pack_hashes``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

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
    """The memory in which a worker holds a block, fastest first."""

    DEVICE = "device"
    """The engine's own KV cache: usable at once."""
    HOST = "host"
    """Host memory: loaded into the engine before use."""
    DISK = "disk"
    OBJECT = "object"
    """An object store, on another machine."""
    BOUNDARY = "boundary"
    """No memory: blocks that all KV cache groups but full attention hold, in whatever memory of the worker (see
    ``HashScheme.boundaries``).
    """


MEMORIES = (KvTier.DEVICE, KvTier.HOST, KvTier.DISK, KvTier.OBJECT)
"""The tiers that hold blocks of full attention."""
NARROW_MARK: Final = 0x9E3779B97F4A7C15
"""If a model's windows have several widths, the tier BOUNDARY has the blocks that the widest hold, and those that all
others hold under their hash XOR this.
"""
TIER_ROTATIONS = (0, 21, 42, 11, 63)
"""Bits by which each tier's hashes are rotated in a digest, so that a block that moves to another tier changes it. The
other tiers had theirs before OBJECT came.
"""


def digest_xor(xors: Iterable[int]) -> int:
    """Combine the XOR of each tier's hashes, fastest tier first (see ``KvDigest``)."""
    joined = 0
    for shift, xor in zip(TIER_ROTATIONS, xors, strict=False):
        joined ^= (xor << shift | xor >> (64 - shift)) & 0xFFFF_FFFF_FFFF_FFFF
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
    """The tier that changed; ignored for CLEARED, which clears all tiers."""
    parent: int | None = None
    """STORED: hash of the block before ``hashes``; None at the start of a chain."""


class KvEventBatch(Message, frozen=True, kw_only=True):
    """Worker -> routers: changes in order. ``seq`` counts batches from 1 in each epoch; after a gap,
    the router requests a snapshot.
    """

    worker_id: WorkerId
    epoch: Epoch
    seq: int
    events: list[KvEvent]


class AskKvSnapshot(Message, frozen=True, kw_only=True):
    """Router -> worker: requests a KvSnapshot."""

    worker_id: WorkerId
    epoch: Epoch


class KvSnapshot(Message, frozen=True, kw_only=True):
    """Worker -> router: every block held after the batch numbered ``seq``."""

    worker_id: WorkerId
    epoch: Epoch
    seq: int
    hashes: bytes
    """Blocks in the device tier."""
    host_hashes: bytes = b""
    disk_hashes: bytes = b""
    object_hashes: bytes = b""
    boundary_hashes: bytes = b""


class KvDigest(Message, frozen=True, kw_only=True):
    """A 16-byte digest of the prefix cache after the batch numbered ``seq``; routers check their index with it."""

    seq: int
    count: int
    """Hashes in all tiers; one in two tiers counts twice."""
    xor: int
    """XOR of all 64-bit hashes, each tier's rotated left by its ``TIER_ROTATIONS``."""
