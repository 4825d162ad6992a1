"""Held blocks, and the translation of the engine's KV events."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import xor

from hypothesis import given
from hypothesis import strategies as st

from services.worker.telemetry import EventTranslation, HeldBlocks
from shared.contracts.kv_events import (
    KvEvent,
    KvEventKind,
    KvTier,
    block_hash64,
    digest_xor,
    pack_hashes,
    unpack_hashes,
)

blocks = st.integers(0, 12)
engine_steps = st.lists(
    st.tuples(st.sampled_from(["stored", "removed"]), st.lists(blocks, min_size=1, max_size=4), st.sampled_from(KvTier))
    | st.just(("cleared", [], KvTier.DEVICE))
)
wire_events = st.lists(
    st.builds(
        lambda kind, hashes, tier: KvEvent(kind=kind, hashes=pack_hashes(hashes), tier=tier),
        st.sampled_from(list(KvEventKind)),
        st.lists(st.integers(0, 20), max_size=5),
        st.sampled_from(KvTier),
    )
)


def full(block: int) -> bytes:
    return block.to_bytes(8, "big") + bytes(24)


@given(engine_steps)
def test_held_blocks_are_those_with_at_least_one_copy(steps):
    translation, held = EventTranslation(), HeldBlocks()
    copies: dict[KvTier, Counter[int]] = {tier: Counter() for tier in KvTier}
    for kind, names, tier in steps:
        there = copies[tier]
        if kind == "cleared":
            for each in copies.values():
                each.clear()
            event = translation.cleared()
        elif kind == "stored":
            there.update(names)
            event = translation.stored(map(full, names), None, tier)
        else:
            gone = [name for name in names if there[name] > 0 and not there.subtract([name])]
            event = translation.removed(map(full, gone), tier)
        if event:
            held.apply([event])

    for tier in KvTier:
        assert set(unpack_hashes(held.packed(tier))) == {block for block, count in copies[tier].items() if count > 0}


@given(wire_events)
def test_the_digest_is_the_digest_of_the_snapshot(events):
    held = HeldBlocks()
    for event in events:
        held.apply([event])

    snapshot = [unpack_hashes(held.packed(tier)) for tier in KvTier]
    digest = held.digest()
    xors = [reduce(xor, hashes, 0) for hashes in snapshot]
    assert (digest.count, digest.xor, digest.seq) == (sum(map(len, snapshot)), digest_xor(xors), len(events))


def test_a_block_that_moves_to_another_tier_changes_the_digest():
    device, host = HeldBlocks(), HeldBlocks()

    device.apply([KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([1 << 63 | 1]))])
    host.apply([KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([1 << 63 | 1]), tier=KvTier.HOST)])

    assert (device.digest().xor, host.digest().xor) == (1 << 63 | 1, 1 << 21 | 1 << 20)


@given(wire_events)
def test_batching_of_events_does_not_change_the_result(events):
    one, many = HeldBlocks(), HeldBlocks()

    one.apply(events)
    for event in events:
        many.apply([event])

    for tier in KvTier:
        assert set(unpack_hashes(one.packed(tier))) == set(unpack_hashes(many.packed(tier)))
    assert one.digest().xor == many.digest().xor


def test_batches_are_numbered_from_one():
    held = HeldBlocks()

    assert [held.apply([]), held.apply([])] == [1, 2]


def test_a_stored_run_names_the_block_before_it():
    event = EventTranslation().stored([full(2), full(3)], full(1))

    assert event == KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([2, 3]), parent=block_hash64(full(1)))


def test_removing_one_of_two_copies_makes_no_event():
    translation = EventTranslation()
    translation.stored([full(1)], None)
    translation.stored([full(1)], None)

    assert translation.removed([full(1)]) is None
    assert unpack_hashes(translation.removed([full(1)]).hashes) == (1,)
