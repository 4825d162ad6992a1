"""A store's files: reading, writing, locking, and validity after a restart."""

from __future__ import annotations

import ctypes
import os

import pytest

from connector.transfer.agent import TransferFailed
from services.worker.engines.store.files import FolderTaken, PlainFile, StoreFiles, open_file
from services.worker.engines.store.records import RECORD, SlotRecord, name_in, pack_record, read_records
from services.worker.engines.store.tiers import Job, JobKind

BLOCKS, SLOTS, BLOCK_BYTES = 4, 8, 4096
MINE = b"m" * 32
NAMES = tuple(bytes([number]) * 32 for number in range(BLOCKS))


class Memory:
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(BLOCKS * BLOCK_BYTES)
        self.at = (ctypes.addressof(self.buffer), BLOCKS * BLOCK_BYTES)


@pytest.fixture
def memory():
    return Memory()


def opened(folder, memory, **changes):
    fields = {
        "identity": MINE,
        "block_bytes": BLOCK_BYTES,
        "slots": SLOTS,
        "memory": memory.at,
        "io": "plain",
        **changes,
    }
    return StoreFiles(folder, **fields)


def job(kind, slots=(6, 0, 3, 1)):
    return Job(kind, NAMES, tuple(range(BLOCKS)), tuple(slots))


def records(checksums, slots=(6, 0, 3, 1)):
    return [SlotRecord(*each, at) for at, each in enumerate(zip(NAMES, slots, checksums, strict=True), 1)]


@pytest.mark.parametrize("io", ["plain", "nixl"])
def test_saved_blocks_load_unchanged_also_after_a_restart(tmp_path, memory, io):
    if io == "nixl":
        pytest.importorskip("nixl")
    content = os.urandom(BLOCKS * BLOCK_BYTES)
    memory.buffer[:] = content
    files = opened(tmp_path, memory, io=io)
    checksums = files.perform(job(JobKind.SAVE))
    files.abandon()  # as a process that is killed
    ctypes.memset(memory.at[0], 0, memory.at[1])

    files = opened(tmp_path, memory, io=io)

    assert [(record.name, record.slot, record.checksum) for record in files.restored] == [
        (record.name, record.slot, record.checksum) for record in records(checksums)
    ]
    assert files.perform(job(JobKind.LOAD)) == checksums
    assert memory.buffer.raw == content
    files.close([])


def test_nixl_and_plain_files_write_the_same_bytes(tmp_path, memory):
    pytest.importorskip("nixl")
    memory.buffer[:] = os.urandom(BLOCKS * BLOCK_BYTES)
    for io in ("plain", "nixl"):
        files = opened(tmp_path / io, memory, io=io)
        files.close(records(files.perform(job(JobKind.SAVE))))

    for name in ("blocks", "index"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "nixl" / name).read_bytes()


def test_a_folder_belongs_to_one_store_at_a_time(tmp_path, memory):
    files = opened(tmp_path, memory)
    with pytest.raises(FolderTaken):
        opened(tmp_path, memory)
    files.close([])

    opened(tmp_path, memory).close([])


@pytest.mark.parametrize("changes", [{"identity": b"o" * 32}, {"block_bytes": BLOCK_BYTES // 2}])
def test_files_of_another_kind_of_blocks_are_emptied(tmp_path, memory, changes):
    files = opened(tmp_path, memory)
    files.close(records(files.perform(job(JobKind.SAVE))))

    opened(tmp_path, memory, **changes).close([])
    again = opened(tmp_path, memory)

    assert again.restored == []
    again.close([])


def test_smaller_files_forget_the_slots_beyond_their_end(tmp_path, memory):
    files = opened(tmp_path, memory)
    files.close(records(files.perform(job(JobKind.SAVE))))

    smaller = opened(tmp_path, memory, slots=2)

    assert sorted(record.slot for record in smaller.restored) == [0, 1]
    assert (tmp_path / "blocks").stat().st_size == 2 * BLOCK_BYTES
    smaller.close([])


def test_the_order_of_use_survives_a_clean_close(tmp_path, memory):
    files = opened(tmp_path, memory)
    kept = records(files.perform(job(JobKind.SAVE)))
    files.close([SlotRecord(one.name, one.slot, one.checksum, 9 - one.used) for one in kept])

    again = opened(tmp_path, memory)

    assert [record.name for record in again.restored] == list(reversed(NAMES))
    again.close([])


def test_a_record_copied_to_another_slot_is_invalid(tmp_path, memory):
    files = opened(tmp_path, memory)
    files.close(records(files.perform(job(JobKind.SAVE))))
    index = bytearray((tmp_path / "index").read_bytes())
    index[64 + 2 * 64 : 64 + 3 * 64] = index[64 + 6 * 64 : 64 + 7 * 64]
    (tmp_path / "index").write_bytes(index)

    again = opened(tmp_path, memory)

    assert sorted(record.slot for record in again.restored) == [0, 1, 3, 6]
    again.close([])


def test_an_io_error_costs_blocks_and_not_the_store(tmp_path, memory):
    files = opened(tmp_path, memory)
    os.ftruncate(files._blocks, 0)

    assert files.perform(job(JobKind.LOAD)) == [b""] * BLOCKS
    files.close([])


def test_plain_files_replace_a_failing_nixl_plugin_unless_required():
    pytest.importorskip("nixl")

    def refuses():
        raise TransferFailed("no such plugin")

    assert isinstance(open_file("auto", 0, refuses), PlainFile)
    with pytest.raises(TransferFailed):
        open_file("nixl", 0, refuses)


def test_records_keep_the_group_of_a_block():
    kept = [SlotRecord(name_in(NAMES[0], group), group % SLOTS, MINE[:16], 1 + group) for group in (0, 1, 2, 7)]
    packed = bytearray(SLOTS * RECORD.size)
    for record in kept:
        packed[record.slot * RECORD.size : (record.slot + 1) * RECORD.size] = pack_record(MINE, record)

    assert read_records(MINE, bytes(packed), SLOTS) == kept
    packed[RECORD.size + RECORD.size - 9] ^= 3  # the group of the second record
    assert read_records(MINE, bytes(packed), SLOTS) == [kept[0], *kept[2:]]


def test_records_of_the_first_group_are_those_of_stores_that_knew_no_other():
    packed = pack_record(MINE, SlotRecord(b"n" * 32, 3, b"c" * 16, 7))

    assert packed.hex() == "6e" * 32 + "63" * 16 + "0700000000000000" + "c977c8d5d2f184aa"
