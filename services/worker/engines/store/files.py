"""A store's files: ``blocks``, an array of slots, and ``index``, with one record per slot.

A lock on the file ``lock`` keeps other processes out of the folder. All calls block, and come from one thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from connector.transfer.agent import TransferFailed
from services.worker.engines.store.records import (
    RECORD,
    SlotRecord,
    checksum_of,
    is_header_of,
    offset_of,
    pack_header,
    pack_record,
    read_records,
)
from services.worker.engines.store.tiers import Job, JobKind

log = logging.getLogger("baton.worker")

ONLY_MINE = 0o600
GONE = b"?"
"""No block has this checksum."""


class FolderTaken(Exception):
    """Another process uses the folder."""


class BlocksGone(Exception):
    """What was to be read is not there, or is shorter: it will not come back."""


class BlockFile(Protocol):
    """Moves blocks between memory and an open file."""

    description: str
    """Text for operators."""

    def write(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        """Copy memory to the file. Raises OSError or TransferFailed; TimeoutError if the copy may still be running."""

    def read(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        """Copy the file to memory. Raises as ``write`` does, and BlocksGone."""

    def close(self) -> None:
        """Release resources, but not the file descriptor."""


class PlainFile:
    """Reads and writes by system calls, where NIXL's file plugin is not available."""

    description = "plain files"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        for address, offset in zip(addresses, offsets, strict=True):
            if os.pwrite(self._descriptor, content_at(address, length), offset) != length:
                raise OSError("a block was written incompletely")

    def read(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        for address, offset in zip(addresses, offsets, strict=True):
            if os.preadv(self._descriptor, [content_at(address, length)], offset) != length:
                raise OSError("the file ends before the block does")

    def close(self) -> None:
        """Do nothing."""


def content_at(address: int, length: int) -> memoryview:
    """A writable view of that memory."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class StoreFiles:
    """``memory``: address and length of the contiguous blocks in memory."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: bytes,
        block_bytes: int,
        slots: int,
        memory: tuple[int, int],
        io: str = "auto",
        elsewhere: BlockFile | None = None,
    ) -> None:
        """Open or create. Raises FolderTaken, OSError; TransferFailed if ``io`` is nixl and NIXL's plugin fails.

        ``elsewhere`` keeps the blocks instead of a file; then only the index is in the folder.
        """
        self.folder = folder
        self.slots = slots
        self._identity = identity
        self._block_bytes = block_bytes
        self._memory = memory[0]
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder / "lock")
        self._blocks = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, ONLY_MINE)
        """Empty where the blocks are kept elsewhere."""
        self._index = os.open(folder / "index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, ONLY_MINE)
        self.restored = self._read_index()
        self._used = max((record.used for record in self.restored), default=0)
        if elsewhere is None:
            os.ftruncate(self._blocks, slots * block_bytes)  # Sparse: space is allocated as it is written.
        self._file = elsewhere or open_file(
            io, self._blocks, lambda: nixl_file(self._blocks, slots * block_bytes, memory)
        )
        self.description = self._file.description

    def perform(self, job: Job) -> list[bytes]:
        """Copy a job's blocks; returns their checksums, empty for blocks that were not copied. Raises TimeoutError if
        the copy may still be running.
        """
        addresses = [self._memory + block * self._block_bytes for block in job.blocks]
        offsets = [slot * self._block_bytes for slot in job.slots]
        try:
            if job.kind is JobKind.LOAD:
                self._file.read(addresses, offsets, self._block_bytes)
                return self._checksums(job, addresses)
            checksums = self._checksums(job, addresses)
            self._file.write(addresses, offsets, self._block_bytes)
            for name, slot, checksum in zip(job.names, job.slots, checksums, strict=True):
                self._used += 1
                self._note(SlotRecord(name, slot, checksum, self._used))
            return checksums
        except TimeoutError:
            raise
        except BlocksGone as error:
            log.warning("%d blocks are gone: %s", len(job.names), error)
            return [GONE] * len(job.names)
        except (OSError, TransferFailed) as error:
            log.warning("%s %d blocks failed: %s", job.kind.value, len(job.names), error)
            return [b""] * len(job.names)

    def close(self, records: Sequence[SlotRecord]) -> None:
        """Write the index in order of use, sync both files, and close them."""
        packed = bytearray(self.slots * RECORD.size)
        for record in records:
            packed[record.slot * RECORD.size : (record.slot + 1) * RECORD.size] = pack_record(self._identity, record)
        try:
            os.pwrite(self._index, packed, offset_of(0))
            os.fsync(self._blocks)
            os.fsync(self._index)
        except OSError as error:
            log.warning("the store's files were not written completely at shutdown: %s", error)
        self.abandon()

    def abandon(self) -> None:
        """Close without writing."""
        self._file.close()
        for descriptor in (self._blocks, self._index, self._lock):
            os.close(descriptor)

    def _checksums(self, job: Job, addresses: Sequence[int]) -> list[bytes]:
        return [
            checksum_of(self._identity, name, content_at(address, self._block_bytes))
            for name, address in zip(job.names, addresses, strict=True)
        ]

    def _note(self, record: SlotRecord) -> None:
        os.pwrite(self._index, pack_record(self._identity, record), offset_of(record.slot))

    def _read_index(self) -> list[SlotRecord]:
        """The records of an earlier process. Empties the files if they belong to blocks of another identity or size."""
        header = pack_header(self._identity, self._block_bytes)
        found = os.pread(self._index, len(header), 0)
        if is_header_of(found, self._identity, self._block_bytes):
            packed = os.pread(self._index, self.slots * RECORD.size, len(header))
            os.ftruncate(self._index, offset_of(self.slots))
            return read_records(self._identity, packed, self.slots)
        if found:
            log.info("the store's files hold blocks of another kind, or are damaged, and are emptied")
        os.ftruncate(self._index, 0)
        os.ftruncate(self._blocks, 0)
        os.pwrite(self._index, header, 0)
        os.ftruncate(self._index, offset_of(self.slots))
        return []


def open_file(io: str, descriptor: int, by_nixl: Callable[[], BlockFile]) -> BlockFile:
    """The ``BlockFile`` for an open file. Raises TransferFailed if ``io`` is nixl and NIXL's plugin fails."""
    if io == "plain" or (io == "auto" and not find_spec("nixl")):
        return PlainFile(descriptor)
    try:
        return by_nixl()
    except TransferFailed as error:
        if io == "nixl":
            raise
        log.warning("NIXL's file plugin cannot be used; the store uses plain files: %s", error)
        return PlainFile(descriptor)


def nixl_file(descriptor: int, size: int, memory: tuple[int, int]) -> BlockFile:
    """NIXL's file plugin. Raises TransferFailed where it cannot run."""
    from connector.transfer.nixl_files import NixlFile  # a machine for simulated workers may have no NIXL

    return NixlFile(f"files-{uuid.uuid4().hex}", descriptor, size, memory)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, ONLY_MINE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise FolderTaken(f"{path.parent} is used by another store") from error
    return descriptor
