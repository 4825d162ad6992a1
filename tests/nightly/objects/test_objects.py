"""Blocks in an object store, a real S3 server of tests: killed, silent, or with objects that are damaged or cut."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest
from obstore import get, put
from obstore import list as list_objects

from connector.transfer.agent import TransferFailed
from services.worker.engines.store.files import BlocksGone
from services.worker.engines.store.objects import CALL_S_MAX, ObjectFile, key_of
from services.worker.engines.store.records import blocks_in_object
from tests.nightly.objects.s3_server import Server, pytestmark, server

__all__ = ("pytestmark", "server")

BLOCK_BYTES, BLOCKS = 1 << 20, 8
BLOCK_BYTES, BLOCKS = 1 << 20, 8


class Memory:
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(os.urandom(BLOCKS * BLOCK_BYTES), BLOCKS * BLOCK_BYTES)
        base = ctypes.addressof(self.buffer)
        self.addresses = [base + block * BLOCK_BYTES for block in range(BLOCKS)]


def opened(server: Server) -> ObjectFile:
    return ObjectFile(f"{server.url}/blocks", "s1", BLOCK_BYTES)


def offsets(*places: int) -> list[int]:
    return [place * BLOCK_BYTES for place in places]


def test_blocks_come_back_from_objects_of_several(server):
    memory, file = Memory(), opened(server)
    before = memory.buffer.raw
    file.write(memory.addresses[:6], offsets(4, 5, 6, 7, 12, 13), BLOCK_BYTES)

    assert blocks_in_object(BLOCK_BYTES) == 4
    assert [len(get(server.bucket(), key_of(number)).bytes()) for number in (1, 3)] == [4 << 20, 2 << 20]
    ctypes.memset(memory.addresses[0], 0, BLOCKS * BLOCK_BYTES)
    file.read(memory.addresses[:3], offsets(5, 6, 13), BLOCK_BYTES)
    assert memory.buffer.raw[: 3 << 20] == before[1 << 20 : 3 << 20] + before[5 << 20 : 6 << 20]


def test_an_object_with_gaps_is_not_written(server):
    with pytest.raises(TransferFailed, match="gaps"):
        opened(server).write(Memory().addresses[:2], offsets(0, 2), BLOCK_BYTES)


def test_an_object_that_was_cut_or_removed_changes_no_memory(server):
    memory, file = Memory(), opened(server)
    file.write(memory.addresses[:4], offsets(0, 1, 2, 3), BLOCK_BYTES)
    ctypes.memset(memory.addresses[0], 7, BLOCKS * BLOCK_BYTES)
    before = memory.buffer.raw
    put(server.bucket(), key_of(0), b"short")

    with pytest.raises(BlocksGone, match="ends before"):
        file.read(memory.addresses[:4], offsets(0, 1, 2, 3), BLOCK_BYTES)
    put(server.bucket(), key_of(0), bytes((4 << 20) + 1))
    with pytest.raises(BlocksGone, match="larger"):
        file.read(memory.addresses[:4], offsets(0, 1, 2, 3), BLOCK_BYTES)
    file.keep_only(set())
    with pytest.raises(BlocksGone, match="not found"):
        file.read(memory.addresses[:4], offsets(0, 1, 2, 3), BLOCK_BYTES)
    assert memory.buffer.raw == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_gone_or_silent_fails_in_time(server, number):
    memory, file = Memory(), opened(server)
    file.write(memory.addresses[:4], offsets(0, 1, 2, 3), BLOCK_BYTES)
    server.process.send_signal(number)

    for call in (file.read, file.write):
        begun = time.monotonic()
        with pytest.raises(TransferFailed):
            call(memory.addresses[:4], offsets(0, 1, 2, 3), BLOCK_BYTES)
        assert time.monotonic() - begun < CALL_S_MAX + 1.0


def test_objects_that_no_index_knows_are_removed_and_those_of_others_stay(server):
    file, memory = opened(server), Memory()
    other = ObjectFile(f"{server.url}/blocks/s1-b", "s2", BLOCK_BYTES)
    for one in (file, other):
        one.write(memory.addresses[:6], offsets(0, 1, 2, 3, 4, 5), BLOCK_BYTES)

    file.keep_only({1})
    assert [each["path"] for page in list_objects(server.bucket()) for each in page] == [key_of(1)]
    other.read(memory.addresses[:6], offsets(0, 1, 2, 3, 4, 5), BLOCK_BYTES)


def test_keeping_objects_of_a_server_that_is_gone_fails_nothing(server):
    file = opened(server)
    server.process.kill()
    file.keep_only(set())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        *((url, "is no http") for url in ("s3://bucket", "http://host", "bucket")),
        *((f"http://{url}", "AWS_ACCESS_KEY_ID") for url in ("key:secret@host/b", "host/b?key=secret")),
    ],
)
def test_a_url_without_a_bucket_or_with_a_secret_is_refused(url, why):
    with pytest.raises(ValueError, match=why) as refused:
        ObjectFile(url, "s1", BLOCK_BYTES)
    assert "secret" not in str(refused.value)
