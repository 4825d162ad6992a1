"""Records of the index file: which block is in each slot of the block file, with checksums.

A record is valid only if its seal (a short checksum of its fields) fits this kind of blocks; a block is valid only if
its bytes give the record's checksum. So the order in which writes reached the disk before a crash does not matter:
torn, mixed or old data fit no checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shared.contracts.kv_exchange import FULL_HASH_BYTES

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
