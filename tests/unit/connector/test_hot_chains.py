"""Which recently used prefixes an engine reports."""

from __future__ import annotations

import math

import pytest

from connector.holder.hot_chains import COOLING_S, LOOK_BACK_BLOCKS_MAX, HotChains
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, unpack_full_hashes
from tests.unit.connector.holding import chain

ALL = 100


class Engine:
    """Chains over a cache that holds every block except ``lost``."""

    def __init__(self, **bounds):
        self.lost = set()
        self.chains = HotChains(self.held, **bounds)

    def held(self, hashes):
        return next((place for place, block in enumerate(hashes) if block in self.lost), len(hashes))

    def for_store(self, evicted_next=(), now=0.0, **wishes):
        """Chains to copy to a store, and whether they are told because they are evicted next."""
        wishes = {"uses_min": 2, "idle_s_max": 1.0, **wishes}
        told = self.chains.for_store(wishes.pop("count", ALL), now, evicted_next=lambda: set(evicted_next), **wishes)
        return [(unpack_full_hashes(one.hashes), one.is_evicting) for one in told]

    def hottest(self, count=ALL, now=0.0, **wishes):
        return [unpack_full_hashes(one.hashes) for one in self.chains.hottest(count, now, **wishes)]


@pytest.fixture
def engine():
    return Engine()


def test_a_request_without_a_full_block_leaves_no_chain(engine):
    engine.chains.note([], 0.0)

    assert engine.hottest() == []


def test_the_next_turn_replaces_the_previous_and_inherits_its_uses(engine):
    conversation = chain(9)
    for turn, blocks in enumerate((3, 6, 9), start=1):
        engine.chains.note(conversation[:blocks], float(turn))

    (one,) = engine.chains.hottest(ALL, 5.0, idle_s_max=2.0)
    assert unpack_full_hashes(one.hashes) == conversation
    assert one.uses == 3
    assert not engine.chains.hottest(ALL, 5.0, idle_s_max=1.9)
    assert engine.chains.blocks == 9


def test_conversations_that_begin_alike_are_chains_of_their_own(engine):
    system, one, other = chain(2, "system"), chain(2, "one"), chain(2, "other")
    engine.chains.note(system, 0.0)
    engine.chains.note(system + one, 1.0)
    engine.chains.note(system + other, 2.0)

    assert sorted(engine.hottest()) == sorted([system + one, system + other])


def test_chains_are_ordered_by_use_then_by_recency(engine):
    often, once, later = chain(2, "often"), chain(2, "once"), chain(2, "later")
    for chains in (often, often, once, later):
        engine.chains.note(chains, 0.0 if chains is not later else 10.0)

    assert engine.hottest(now=10.0) == [often, later, once]


def test_old_uses_count_less_than_recent_ones(engine):
    old, new = chain(2, "old"), chain(2, "new")
    for _ in range(4):
        engine.chains.note(old, 0.0)
    engine.chains.note(new, 3 * COOLING_S)

    assert engine.hottest(now=3 * COOLING_S) == [new, old]


def test_a_chain_is_cut_to_its_cached_part(engine):
    hashes, gone = chain(6), chain(4, "gone")
    engine.chains.note(hashes, 0.0)
    engine.chains.note(gone, 0.0)
    engine.lost = {hashes[4], hashes[5], *gone}

    assert engine.hottest() == [hashes[:4]]


def test_chains_with_the_same_cached_part_are_returned_once(engine):
    system = chain(2, "system")
    one, other = system + chain(2, "one"), system + chain(2, "other")
    engine.chains.note(one, 0.0)
    engine.chains.note(other, 0.0)
    engine.lost = {*one[2:], *other[2:]}

    assert engine.hottest() == [system]


def test_a_colder_longer_chain_replaces_its_prefix(engine):
    long = chain(LOOK_BACK_BLOCKS_MAX * 3)
    short = long[:5]
    engine.chains.note(long, 0.0)
    engine.chains.note(short, 0.0)
    engine.chains.note(short, 0.0)

    assert engine.hottest() == [long]


def test_chains_can_be_filtered_by_uses_and_recency(engine):
    often, once, old = chain(2, "often"), chain(2, "once"), chain(2, "old")
    for hashes, at in ((old, 0.0), (old, 0.0), (once, 100.0), (often, 100.0), (often, 100.0)):
        engine.chains.note(hashes, at)

    assert engine.hottest(now=101.0, uses_min=2, idle_s_max=5.0) == [often]
    assert engine.hottest(1, now=101.0, uses_min=2) == [often]


def test_the_least_recently_used_chains_are_dropped_first():
    engine = Engine(chains_max=2, blocks_max=10)
    first, second, third = chain(4, "1"), chain(4, "2"), chain(4, "3")
    for hashes in (first, second, first, third):
        engine.chains.note(hashes, 0.0)
    assert sorted(engine.hottest()) == sorted([first, third])

    engine.chains.note(chain(7, "long"), 0.0)
    assert engine.hottest() == [chain(7, "long")]


def test_a_chain_is_cut_to_the_size_of_one_lease(engine):
    hashes = [index.to_bytes(32, "big") for index in range(LEASE_BLOCKS_MAX + 7)]
    engine.chains.note(hashes, 0.0)

    assert engine.hottest() == [hashes[:LEASE_BLOCKS_MAX]]


def test_a_store_is_offered_what_is_used_twice_or_evicted_next(engine):
    once, twice, goes = chain(3, "once"), chain(3, "twice"), chain(3, "goes")
    for hashes in (goes, once, twice, twice):
        engine.chains.note(hashes, 0.0)

    assert engine.for_store({goes[2], *chain(2, "of no chain")}) == [(goes, True), (twice, False)]
    assert engine.for_store() == [(twice, False)]


def test_what_is_evicted_next_is_offered_once_after_each_use(engine):
    hashes = chain(3)
    engine.chains.note(hashes, 0.0)

    assert engine.for_store(hashes) == [(hashes, True)]
    assert engine.for_store(hashes) == []
    engine.chains.note(hashes, 10.0)
    assert engine.for_store(hashes, now=20.0) == [(hashes, True)]
    assert engine.for_store(hashes, now=20.0, uses_min=3, idle_s_max=math.inf) == [(hashes, True)], "for a new store"
    assert engine.chains.take_lost() == 0


def test_of_what_was_evicted_before_it_was_offered_the_rest_is_offered_and_the_loss_counted(engine):
    gone, cut, kept = chain(4, "gone"), chain(6, "cut"), chain(5, "kept")
    for hashes in (gone, cut, kept):
        engine.chains.note(hashes, 0.0)
    engine.lost = {*gone, *cut[4:]}

    assert engine.for_store() == [(cut[:4], True)]
    assert (engine.chains.take_lost(), engine.chains.take_lost()) == (6, 0)


def test_what_was_gone_before_there_was_a_store_is_no_loss(engine):
    gone = chain(4)
    engine.chains.note(gone, 0.0)
    engine.lost = set(gone)

    assert engine.for_store(idle_s_max=math.inf) == []
    assert engine.chains.take_lost() == 0


def test_no_loss_is_counted_twice_or_of_what_was_offered(engine):
    hashes = chain(4)
    engine.chains.note(hashes, 0.0)
    engine.for_store(hashes)
    engine.lost = set(hashes)

    assert engine.for_store() == []
    assert engine.chains.take_lost() == 0


def test_chains_too_short_to_fetch_are_neither_offered_nor_lost(engine):
    engine.chains.note(chain(3), 0.0)

    assert engine.for_store(chain(3), blocks_min=4) == []
    engine.lost = set(chain(3))
    engine.for_store(blocks_min=4)
    assert engine.chains.take_lost() == 0


def test_chains_that_the_table_drops_are_lost_to_a_store():
    engine = Engine(chains_max=1)
    engine.chains.note(chain(4, "1"), 0.0)
    engine.chains.note(chain(4, "2"), 0.0)

    assert engine.chains.take_lost() == 4


def test_what_does_not_fit_into_a_reply_is_offered_in_the_next(engine):
    first, second = chain(3, "1"), chain(3, "2")
    engine.chains.note(first, 0.0)
    engine.chains.note(second, 0.0)

    assert engine.for_store({*first, *second}, count=1) == [(first, True)]
    assert engine.for_store({*first, *second}, count=1) == [(second, True)]
