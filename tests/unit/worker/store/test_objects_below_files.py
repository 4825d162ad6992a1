"""A third tier: blocks that files have evicted come back from objects, and a silent object store is left alone."""

from __future__ import annotations

import hashlib

import pytest

from connector.groups import Blocks, full_attention
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.store.slots import FileTier, ObjectTier
from services.worker.engines.store.tiers import GATHER_S, LOAD_AGAIN_S, Job, JobKind, Tiers

SUM = b"c" * 16
FILES, OBJECTS = 0, 1


def chain(number: int, length: int) -> list[bytes]:
    return [hashlib.sha256(bytes([number, at])).digest() for at in range(length)]


class Store:
    def __init__(self) -> None:
        self.now = 100.0
        objects = ObjectTier(32, together=2)
        self.tiers = Tiers(BlockCache(4), FileTier(4), 3, full_attention(32), objects, lambda: self.now)

    def keep(self, names: list[bytes]) -> None:
        blocks = self.tiers.allocate(len(names))
        self.tiers.cache(names, Blocks(0, 0, blocks), 32 * len(names))
        self.tiers.free(blocks)
        self.work()

    def work(self, checksum: bytes = SUM) -> list[tuple[int, Job]]:
        """All jobs of both tiers."""
        done = []
        self.now += GATHER_S
        for below in (FILES, OBJECTS):
            while (job := self.tiers.next_job(self.now, below)) is not None:
                self.tiers.ended(job, [checksum] * len(job.names), self.now, below)
                done.append((below, job))
        return done

    def load(self, names: list[bytes]) -> None:
        self.tiers.load(self.tiers.requested(names))


@pytest.fixture
def store():
    store = Store()
    for number in range(3):
        store.keep(chain(number, 4))
    return store


def test_each_block_is_saved_in_both_tiers(store):
    assert [len(below.slots) for below in store.tiers.below] == [4, 12]
    assert store.tiers.counts.saved == 24


def test_blocks_that_files_evicted_are_loaded_from_objects_and_saved_in_files_again(store):
    store.load(chain(0, 4))
    done = store.work()

    assert [(below, job.kind) for below, job in done if job.kind is JobKind.LOAD] == [(OBJECTS, JobKind.LOAD)] * 2
    assert all(store.tiers.memory.block_of(name) is not None for name in chain(0, 4))
    store.work()
    assert all(store.tiers.files.slot_of(name) is not None for name in chain(0, 4))


def test_files_are_asked_before_objects(store):
    store.keep(chain(3, 1))
    for name in chain(2, 4):
        assert store.tiers.below[OBJECTS].slots.slot_of(name) is not None

    store.load(chain(2, 4))

    assert {below for below, job in store.work() if job.kind is JobKind.LOAD} <= {FILES, OBJECTS}


def test_what_a_silent_object_store_has_is_not_asked_for_until_later(store):
    store.load(chain(0, 4))
    store.work(checksum=b"")

    assert store.tiers.counts.damaged == 0
    assert store.tiers.requested(chain(0, 4)) == []
    held = store.tiers.hold(chain(2, 4))
    assert held.full == 4, "memory and files serve on"
    store.tiers.free(held.blocks)
    store.now += LOAD_AGAIN_S
    assert store.tiers.requested(chain(0, 4)) == chain(0, 4)


def test_the_silence_of_an_object_store_lasts_from_its_first_failure_to_its_next_answer(store):
    objects = store.tiers.objects
    assert objects.silent_since is None
    store.load(chain(0, 4))
    store.work(checksum=b"")
    begun = store.now
    store.now += LOAD_AGAIN_S
    store.load(chain(0, 4))
    store.work(checksum=b"")
    assert objects.silent_since == begun

    store.now += LOAD_AGAIN_S
    store.load(chain(0, 4))
    store.work()
    assert objects.silent_since is None


def test_a_damaged_object_block_is_forgotten(store):
    store.load(chain(0, 2))
    store.work(checksum=b"x" * 16)

    assert store.tiers.counts.damaged == 2
    assert store.tiers.requested(chain(0, 4)) == []
