"""Layout of a store's block and index records, as bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from connector.layout.tensors import PROTOCOL_VERSION, why_malformed
from shared.contracts.kv_exchange import FULL_HASH_BYTES, KvHandshake, KvLayer, KvPlane

BLOCK_BYTES_COUNTED_MIN = 16 * 1024
"""A block counts as at least this much of a store's memory: simulated blocks are a few bytes long, and the bookkeeping
of millions of them would take more.
"""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Of one block: all heads of all layers."""

    fingerprint: str
    block_tokens: int
    kv_heads: int
    layers: tuple[tuple[int, ...], ...]
    """For each layer, the length of one head in each of its planes."""

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return self.kv_heads * sum(map(sum, self.layers))

    def blocks_in(self, size: int) -> int:
        """How many blocks fit into ``size`` bytes."""
        return size // max(self.block_bytes, BLOCK_BYTES_COUNTED_MIN)

    def at(self, base: int) -> list[KvLayer]:
        """The layers of contiguous blocks that begin at ``base``."""
        layers: list[KvLayer] = []
        start = base
        for heads in self.layers:
            planes, offset = [], 0
            for head_bytes in heads:
                planes.append(KvPlane(offset=offset, head_bytes=head_bytes, heads=self.kv_heads))
                offset += head_bytes * self.kv_heads
            layers.append(KvLayer(base=start, block_stride=self.block_bytes, planes=planes))
            start += offset
        return layers

    def identity(self) -> bytes:
        """32 bytes that differ for blocks of different meaning."""
        return hashlib.sha256(
            repr((PROTOCOL_VERSION, self.fingerprint, self.block_tokens, self.kv_heads, self.layers)).encode()
        ).digest()


def shape_of(handshake: KvHandshake) -> BlockShape:
    """Of a worker's blocks. Raises ValueError for a malformed handshake."""
    if why := why_malformed(handshake):
        raise ValueError(why)
    planes = tuple(tuple(plane.head_bytes for plane in layer.planes) for layer in handshake.ranks[0].layers)
    shape = BlockShape(handshake.fingerprint, handshake.block_size, handshake.kv_heads, planes)
    if shape.block_bytes <= 0 or handshake.block_size <= 0:
        raise ValueError("its blocks have no bytes")
    return shape


MAGIC = b"BATONKV1"
CHECKSUM_BYTES = 16
SEAL_BYTES = 8
HEADER = struct.Struct(f"<8s32sQ{SEAL_BYTES}s8x")
"""Magic, identity, bytes of a block, seal."""
RECORD = struct.Struct(f"<{FULL_HASH_BYTES}s{CHECKSUM_BYTES}sQ{SEAL_BYTES}s")
"""Block hash, checksum, a count that says when it was last used (0: free), seal."""
assert HEADER.size == RECORD.size, "record n follows the header and n records"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot."""

    name: bytes
    slot: int
    checksum: bytes
    used: int
    """Larger is later."""


def checksum_of(identity: bytes, name: bytes, content: memoryview | bytes) -> bytes:
    """Of a block's kind, hash and content."""
    digest = hashlib.sha256(identity + name)
    digest.update(content)
    return digest.digest()[:CHECKSUM_BYTES]


def pack_header(identity: bytes, block_bytes: int) -> bytes:
    """The first bytes of the index."""
    return HEADER.pack(MAGIC, identity, block_bytes, _seal(identity, MAGIC, block_bytes))


def is_header_of(packed: bytes, identity: bytes, block_bytes: int) -> bool:
    """Whether the index is of this kind of blocks."""
    return packed[: HEADER.size] == pack_header(identity, block_bytes)


def pack_record(identity: bytes, record: SlotRecord) -> bytes:
    about = (record.name, record.checksum, record.used)
    return RECORD.pack(*about, _seal(identity, *about, record.slot))


def offset_of(slot: int) -> int:
    """Of a slot's record in the index."""
    return HEADER.size + slot * RECORD.size


def read_records(identity: bytes, packed: bytes, slots: int) -> list[SlotRecord]:
    """The valid records after the header, the least recently used first, one for each block."""
    newest: dict[bytes, SlotRecord] = {}
    for record in _each(identity, packed, slots):
        known = newest.get(record.name)
        if known is None or known.used < record.used:
            newest[record.name] = record
    return sorted(newest.values(), key=lambda record: record.used)


def _each(identity: bytes, packed: bytes, slots: int) -> Iterator[SlotRecord]:
    whole = min(slots, len(packed) // RECORD.size)
    for slot, fields in enumerate(RECORD.iter_unpack(packed[: whole * RECORD.size])):
        name, checksum, used, seal = fields
        if used and seal == _seal(identity, name, checksum, used, slot):
            yield SlotRecord(name, slot, checksum, used)


def _seal(*fields: bytes | int) -> bytes:
    return hashlib.sha256(b"".join(_bytes(fields))).digest()[:SEAL_BYTES]


def _bytes(fields: Iterable[bytes | int]) -> Iterator[bytes]:
    for field in fields:
        yield field if isinstance(field, bytes) else field.to_bytes(8, "little")
