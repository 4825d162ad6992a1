"""Byte layout of a store: of one block, and of the records in the index file.

The layers of a block follow each other, so that a block is contiguous in memory and in a file. Layers, planes and heads
are those of the first worker that the store meets. The fingerprint says whether another worker's blocks have the same
meaning.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from connector.layout.tensors import PROTOCOL_VERSION, Content, contents_of, why_malformed
from shared.contracts.kv_exchange import FULL_HASH_BYTES, GROUP, KvGroup, KvGroupKind, KvHandshake, KvLayer, KvPlane

BLOCK_BYTES_COUNTED_MIN = 16 * 1024
"""A block counts as at least this much of a store's memory. Simulated blocks are a few bytes long; without a minimum,
the records of millions of them would take more memory than the blocks.
"""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of one block: all heads of all layers."""

    fingerprint: str
    hash_block_size: int
    alignment: int
    groups: tuple[KvGroup, ...]
    layers: tuple[tuple[str, Content], ...]
    """The name of each layer and its content."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.groups[GROUP].block_size

    @property
    def block_bytes(self) -> int:
        return sum(head_bytes * total for _name, (_group, planes) in self.layers for head_bytes, total in planes)

    def blocks_in(self, size: int) -> int:
        """How many blocks fit into ``size`` bytes."""
        return size // max(self.block_bytes, BLOCK_BYTES_COUNTED_MIN)

    def at(self, base: int) -> list[KvLayer]:
        """The layers of contiguous blocks that begin at ``base``."""
        layers: list[KvLayer] = []
        start = base
        for name, (group, contents) in self.layers:
            planes, offset = [], 0
            for head_bytes, total in contents:
                planes.append(KvPlane(offset=offset, head_bytes=head_bytes, heads=total, total=total))
                offset += head_bytes * total
            layers.append(KvLayer(name=name, group=group, base=start, block_stride=self.block_bytes, planes=planes))
            start += offset
        return layers

    def identity(self) -> bytes:
        """32 bytes that differ if the fingerprint, the shape or the protocol version differs."""
        groups = [(str(group.kind), group.block_size, group.window) for group in self.groups]
        return hashlib.sha256(
            repr((PROTOCOL_VERSION, self.fingerprint, self.hash_block_size, groups, self.layers)).encode()
        ).digest()


def shape_of(handshake: KvHandshake) -> BlockShape:
    """Shape of a worker's blocks. Raises ValueError for a malformed handshake, and for a model whose blocks are not all
    of one shape.
    """
    if why := why_malformed(handshake):
        raise ValueError(why)
    if kinds := [str(group.kind) for group in handshake.groups if group.kind is not KvGroupKind.FULL]:
        raise ValueError(f"a store keeps full attention only, and the model has {', '.join(kinds)}: run none for it")
    if len(handshake.groups) > 1:
        raise ValueError(f"the model has {len(handshake.groups)} KV cache groups, a store keeps one: run none for it")
    layers = tuple(contents_of(handshake.ranks[0]).items())
    return BlockShape(
        handshake.fingerprint, handshake.hash_block_size, handshake.alignment, tuple(handshake.groups), layers
    )


MAGIC = b"BATONKV1"
CHECKSUM_BYTES = 16
SEAL_BYTES = 8
HEADER = struct.Struct(f"<8s32sQ{SEAL_BYTES}s8x")
"""Magic, identity, bytes of a block, seal."""
RECORD = struct.Struct(f"<{FULL_HASH_BYTES}s{CHECKSUM_BYTES}sQ{SEAL_BYTES}s")
"""Block hash, checksum, order of use (0: the slot is free), seal."""
assert HEADER.size == RECORD.size, "record n follows the header and n records"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One occupied slot of the block file."""

    name: bytes
    slot: int
    checksum: bytes
    used: int
    """Order of use: the larger, the later."""


def checksum_of(identity: bytes, name: bytes, content: memoryview | bytes) -> bytes:
    """Checksum of a block's identity, hash and content."""
    digest = hashlib.sha256(identity + name)
    digest.update(content)
    return digest.digest()[:CHECKSUM_BYTES]


def pack_header(identity: bytes, block_bytes: int) -> bytes:
    """The first record of the index."""
    return HEADER.pack(MAGIC, identity, block_bytes, _seal(identity, MAGIC, block_bytes))


def is_header_of(packed: bytes, identity: bytes, block_bytes: int) -> bool:
    """Whether the index belongs to blocks of this identity and size."""
    return packed[: HEADER.size] == pack_header(identity, block_bytes)


def pack_record(identity: bytes, record: SlotRecord) -> bytes:
    about = (record.name, record.checksum, record.used)
    return RECORD.pack(*about, _seal(identity, *about, record.slot))


def offset_of(slot: int) -> int:
    return HEADER.size + slot * RECORD.size


def read_records(identity: bytes, packed: bytes, slots: int) -> list[SlotRecord]:
    """The valid records after the header, one per block, the least recently used first."""
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
