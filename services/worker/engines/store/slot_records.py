"""What the index file says of each place in the file of blocks, as bytes that prove themselves.

A record counts only if it is whole, and of this very kind of blocks; the block that it names counts only if its bytes,
read back, give the record's checksum. So it does not matter in which order a crash let things reach the disk: whatever
is torn, mixed or old fits no checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shared.contracts.kv_exchange import FULL_HASH_BYTES

MAGIC = b"BATONKV1"
CHECKSUM_BYTES = 16
TRANSFER_REPORT_BYTES = 8
HEADER = struct.Struct(f"<8s32sQ{TRANSFER_REPORT_BYTES}s8x")
"""Magic, identity, bytes of a block, transfer_report."""
RECORD = struct.Struct(f"<{FULL_HASH_BYTES}s{CHECKSUM_BYTES}sQ{TRANSFER_REPORT_BYTES}s")
"""Name, checksum, when it was last used (a count; 0: never), transfer_report."""
assert HEADER.size == RECORD.size, "record n follows the header and n records"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One place."""

    name: bytes
    slot: int
    checksum: bytes
    used: int
    """Larger: later."""


def checksum_of(identity: bytes, name: bytes, content: memoryview | bytes) -> bytes:
    """Of a block: whose kind it is of, what it is called and what it holds."""
    digest = hashlib.sha256(identity + name)
    digest.update(content)
    return digest.digest()[:CHECKSUM_BYTES]


def pack_header(identity: bytes, block_bytes: int) -> bytes:
    """The index's first bytes."""
    return HEADER.pack(MAGIC, identity, block_bytes, _transfer_report(identity, MAGIC, block_bytes))


def is_header_of(packed: bytes, identity: bytes, block_bytes: int) -> bool:
    """Whether an index that begins so is about this kind of blocks."""
    return packed[: HEADER.size] == pack_header(identity, block_bytes)


def pack_record(identity: bytes, record: SlotRecord) -> bytes:
    """For the place that it names."""
    about = (record.name, record.checksum, record.used)
    return RECORD.pack(*about, _transfer_report(identity, *about, record.slot))


def offset_of(slot: int) -> int:
    """Where a place's record is in the index."""
    return HEADER.size + slot * RECORD.size


def read_records(identity: bytes, packed: bytes, slots: int) -> list[SlotRecord]:
    """All that can be believed of the records behind the header, the least recently used first; no name twice."""
    newest: dict[bytes, SlotRecord] = {}
    for record in _each(identity, packed, slots):
        known = newest.get(record.name)
        if known is None or known.used < record.used:
            newest[record.name] = record
    return sorted(newest.values(), key=lambda record: record.used)


def _each(identity: bytes, packed: bytes, slots: int) -> Iterator[SlotRecord]:
    whole = min(slots, len(packed) // RECORD.size)
    for slot, fields in enumerate(RECORD.iter_unpack(packed[: whole * RECORD.size])):
        name, checksum, used, transfer_report = fields
        if used and transfer_report == _transfer_report(identity, name, checksum, used, slot):
            yield SlotRecord(name, slot, checksum, used)


def _transfer_report(*fields: bytes | int) -> bytes:
    return hashlib.sha256(b"".join(_bytes(fields))).digest()[:TRANSFER_REPORT_BYTES]


def _bytes(fields: Iterable[bytes | int]) -> Iterator[bytes]:
    for field in fields:
        yield field if isinstance(field, bytes) else field.to_bytes(8, "little")
