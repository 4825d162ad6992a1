"""Places of blocks in objects that are written and evicted as a whole."""

from __future__ import annotations

import pytest

from services.worker.engines.store.records import SlotRecord
from services.worker.engines.store.slots import ObjectTier
from shared.contracts.kv_events import KvEventKind

SUM = b"c" * 16


def name(number: int) -> bytes:
    return bytes([number]) * 32


def filled(tier: ObjectTier, *numbers: int) -> list[int]:
    slots = tier.take(len(numbers))
    for number, slot in zip(numbers, slots, strict=True):
        tier.put(name(number), slot, SUM)
    return slots


@pytest.fixture
def tier():
    return ObjectTier(slots=14, together=4)  # three objects


def test_blocks_saved_together_are_in_one_object(tier):
    assert [filled(tier, 1, 2, 3, 4), filled(tier, 5, 6), filled(tier, 7)] == [[0, 1, 2, 3], [4, 5], [8]]
    assert tier.slots == 12


def test_the_least_recently_used_object_is_evicted_whole(tier):
    for first in (1, 5, 9):
        filled(tier, *range(first, first + 4))
    tier.used([name(number) for number in (1, 2, 3, 4)])
    tier.take_changes()

    assert filled(tier, 20) == [4]
    removed, stored = tier.take_changes()
    assert (removed.kind, sorted(removed.hashes)) == (KvEventKind.REMOVED, [name(number) for number in (5, 6, 7, 8)])
    assert (stored.kind, stored.hashes) == (KvEventKind.STORED, [name(20)])
    assert tier.evicted_total == 4


def test_an_object_that_is_read_or_filled_is_not_evicted(tier):
    held = filled(tier, 1, 2, 3, 4)
    tier.hold(held[:1])
    filled(tier, 5)
    tier.take(2)  # being filled

    assert filled(tier, 6) == [4]
    tier.hold([4])
    assert tier.take(1) == []
    tier.release(held[:1])
    assert tier.take(1) == [0]


def test_an_object_is_free_when_its_last_block_was_dropped(tier):
    slots = filled(tier, 1, 2)
    filled(tier, 3)
    filled(tier, 4)
    tier.hold(slots)
    for number in (1, 2):
        tier.drop(name(number))
    assert filled(tier, 5) == [4], "block 3 makes way, as the dropped ones are held"

    tier.release(slots)
    assert tier.take(1) == [0]


def test_places_that_were_not_filled_are_given_back(tier):
    tier.give_back(tier.take(3))
    assert [tier.take(4)[0] for _object in range(3)] == [0, 4, 8]


def test_records_restore_the_objects(tier):
    tier.restore([SlotRecord(name(1), 5, SUM, 1), SlotRecord(name(2), 4, SUM, 2), SlotRecord(name(3), 13, SUM, 3)])

    assert (tier.slot_of(name(1)), tier.slot_of(name(3))) == (5, None)
    assert [tier.take(1), tier.take(1), tier.take(1)] == [[0], [8], [4]]
