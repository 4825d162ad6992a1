"""Byte layout of a store: of one block, and of the records in the index file.

The layers of a block follow each other, so that a block is contiguous in memory and in a file. Layers, planes and heads
are those of the first worker that the store meets. The fingerprint says whether another worker's blocks have the same
meaning.

Each block of memory and each slot of the file can hold a block of any KV cache group: it is as large as the largest.
Little is lost, because vLLM gives the blocks of all groups one size, too.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from connector.groups import GroupPlan
from connector.layout.tensors import PROTOCOL_VERSION, Content, by_numbers, contents_of, why_malformed
from shared.contracts.kv_exchange import FULL_HASH_BYTES, KvGroup, KvHandshake, KvLayer, KvPlane

BLOCK_BYTES_COUNTED_MIN = 16 * 1024
"""A block counts as at least this much of a store's memory. Simulated blocks are a few bytes long; without a minimum,
the records of millions of them would take more memory than the blocks.
"""


OBJECT_BYTES = 4 << 20
"""Largest object of an object store, which charges and answers by request."""


def blocks_in_object(block_bytes: int) -> int:
    """How many blocks are one object."""
    return max(1, OBJECT_BYTES // max(block_bytes, BLOCK_BYTES_COUNTED_MIN))


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of the blocks: all heads of all layers of a KV cache group."""

    fingerprint: str
    hash_block_size: int
    alignment: int
    groups: tuple[KvGroup, ...]
    layers: tuple[tuple[str, Content], ...]
    """The name of each layer and its content."""
    beyond: int = 0
    """``KvHandshake.beyond``."""

    @property
    def plan(self) -> GroupPlan:
        return GroupPlan(self.groups, self.hash_block_size, self.alignment, beyond=self.beyond)

    @property
    def block_tokens(self) -> int:
        """Tokens of full attention for which one block is enough, to estimate how many tokens fit."""
        plan = self.plan
        return max(1, plan.stride // max(1, len(plan.full)))

    @property
    def block_bytes(self) -> int:
        """Size of the largest group's block."""
        sizes = Counter[int]()
        for _name, (group, planes) in self.layers:
            sizes[group] += sum(head_bytes * total for head_bytes, total in planes)
        return max(sizes.values())

    def blocks_in(self, size: int) -> int:
        """How many blocks fit into ``size`` bytes."""
        return size // max(self.block_bytes, BLOCK_BYTES_COUNTED_MIN)

    def at(self, base: int) -> list[KvLayer]:
        """The layers of contiguous blocks that begin at ``base``; those of each group begin there."""
        layers: list[KvLayer] = []
        starts: defaultdict[int, int] = defaultdict(lambda: base)
        for name, (group, contents) in self.layers:
            start = starts[group]
            planes, offset = [], 0
            for head_bytes, total in contents:
                planes.append(KvPlane(offset=offset, head_bytes=head_bytes, heads=total, total=total))
                offset += head_bytes * total
            layers.append(KvLayer(name=name, group=group, base=start, block_stride=self.block_bytes, planes=planes))
            starts[group] += offset
        return layers

    def identity(self) -> bytes:
        """32 bytes that differ if the fingerprint, the shape or the protocol version differs."""
        groups = [(str(group.kind), group.block_size, group.window) for group in self.groups]
        return hashlib.sha256(
            repr((PROTOCOL_VERSION, self.fingerprint, self.hash_block_size, groups, self.layers)).encode()
        ).digest()


def shape_of(handshake: KvHandshake) -> BlockShape:
    """Shape of a worker's blocks. Raises ValueError for a malformed handshake, and if blocks end between two hashes."""
    if why := why_malformed(handshake):
        raise ValueError(why)
    unit, sizes = handshake.hash_block_size, [group.block_size for group in handshake.groups]
    if any(tokens % unit for tokens in (*sizes, handshake.alignment)):
        raise ValueError(f"blocks of {sizes} tokens, boundaries of {handshake.alignment}: hashes are of {unit} tokens")
    contents = contents_of(handshake.ranks)
    layers = tuple((name, contents[name]) for name in sorted(contents, key=by_numbers))
    return BlockShape(
        handshake.fingerprint,
        handshake.hash_block_size,
        handshake.alignment,
        tuple(handshake.groups),
        layers,
        handshake.beyond,
    )


def name_in(block_hash: bytes, group: int) -> bytes:
    """The name of a group's block: its hash, followed by the number of any group but the first."""
    return block_hash + bytes([group]) if group else block_hash


def group_of(name: bytes) -> int:
    """See ``name_in``."""
    return name[FULL_HASH_BYTES] if len(name) > FULL_HASH_BYTES else 0


MAGIC = b"BATONKV1"
CHECKSUM_BYTES = 16
SEAL_BYTES = 8
HEADER = struct.Struct(f"<8s32sQ{SEAL_BYTES}s8x")
"""Magic, identity, bytes of a block, seal."""
RECORD = struct.Struct(f"<{FULL_HASH_BYTES}s{CHECKSUM_BYTES}sQ{SEAL_BYTES}s")
"""Block hash, checksum, order of use (0: the slot is free) and in its highest byte the group, seal."""
GROUP_SHIFT = 56
assert HEADER.size == RECORD.size, "record n follows the header and n records"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One occupied slot of the block file."""

    name: bytes
    """See ``name_in``."""
    slot: int
    checksum: bytes
    used: int
    """Order of use: the larger, the later."""


def checksum_of(identity: bytes, name: bytes, content: memoryview | bytes) -> bytes:
    """Checksum of a block's identity, name and content."""
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
    used = record.used | group_of(record.name) << GROUP_SHIFT
    about = (record.name[:FULL_HASH_BYTES], record.checksum, used)
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
        block_hash, checksum, used, seal = fields
        if used and seal == _seal(identity, block_hash, checksum, used, slot):
            group, order = divmod(used, 1 << GROUP_SHIFT)
            yield SlotRecord(name_in(block_hash, group), slot, checksum, order)


def _seal(*fields: bytes | int) -> bytes:
    return hashlib.sha256(b"".join(_bytes(fields))).digest()[:SEAL_BYTES]


def _bytes(fields: Iterable[bytes | int]) -> Iterator[bytes]:
    for field in fields:
        yield field if isinstance(field, bytes) else field.to_bytes(8, "little")
