"""The paged cache loses no block, evicts none in use, and its events are exact."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.kv_events import HeldBlocks
from shared.contracts.kv_events import block_hash64, pack_hashes, unpack_hashes
from tests.support.examples import examples

BLOCKS = 8


def name(number):
    return number.to_bytes(32, "little")


class CacheAgainstModel(RuleBasedStateMachine):
    """Any order of taking, naming, finding, holding and releasing."""

    def __init__(self):
        super().__init__()
        self.cache = BlockCache(BLOCKS)
        self.held: list[list[int]] = []
        self.told = HeldBlocks()

    @rule(count=st.integers(1, BLOCKS + 1))
    def take(self, count):
        free = self.cache.free
        taken = self.cache.take(count)

        assert (taken is None) == (count > free)
        if taken is not None:
            in_use = {block for blocks in self.held for block in blocks}
            assert len(set(taken)) == count
            assert not in_use & set(taken)
            self.held.append(taken)

    @rule(which=st.integers(0, 20), number=st.integers(1, 12))
    def name(self, which, number):
        if self.held:
            block = self.held[which % len(self.held)][0]
            if self.cache._names[block] is None:
                self.cache.name(block, name(number), None)

    @rule(numbers=st.lists(st.integers(1, 12), unique=True, max_size=4))
    def find_and_hold(self, numbers):
        found = self.cache.find([name(number) for number in numbers], 3)
        room = self.cache.free_after_holding(found)
        self.cache.hold(found)

        assert self.cache.free == room
        assert len(found) <= 3
        assert [self.cache._names[block] for block in found] == [name(number) for number in numbers[: len(found)]]
        if found:
            self.held.append(found)

    @rule(which=st.integers(0, 20))
    def release(self, which):
        if self.held:
            self.cache.release(self.held.pop(which % len(self.held)))

    @invariant()
    def every_block_is_free_or_held_as_often_as_it_is_used(self):
        uses = [block for blocks in self.held for block in blocks]

        assert self.cache._holders == [uses.count(block) for block in range(BLOCKS)]
        assert set(self.cache._free) == set(range(BLOCKS)) - set(uses)

    @invariant()
    def the_events_replayed_are_the_content(self):
        self.told.apply(self.cache.take_events())

        assert set(unpack_hashes(self.told.packed())) == {block_hash64(full) for full in self.cache.hashes()}


TestAnyOrderOfCalls = CacheAgainstModel.TestCase
TestAnyOrderOfCalls.settings = hypothesis_settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_eviction_is_lru_and_takes_the_end_of_a_prefix_first():
    cache = BlockCache(4)
    first, second = cache.take(2), cache.take(2)
    for index, block in enumerate([*first, *second]):
        cache.name(block, name(index), None)
    cache.release(second)
    cache.release(first)
    cache.take_events()

    cache.take(3)

    removed = b"".join(event.hashes for event in cache.take_events())
    assert removed == pack_hashes(map(block_hash64, [name(3), name(2), name(1)]))


def test_unnamed_blocks_are_taken_before_cached_ones():
    cache = BlockCache(2)
    named, nameless = cache.take(1), cache.take(1)
    cache.name(named[0], name(1), None)
    cache.release(named)
    cache.release(nameless)

    assert cache.take(1) == nameless


def test_consecutive_blocks_make_one_event_with_their_parent():
    cache = BlockCache(4)
    blocks = cache.take(3)
    cache.name(blocks[0], name(1), name(9))
    cache.name(blocks[1], name(2), name(1))
    cache.name(blocks[2], name(3), name(7))

    first, second = cache.take_events()

    assert (first.hashes, first.parent) == (pack_hashes(map(block_hash64, [name(1), name(2)])), block_hash64(name(9)))
    assert (second.hashes, second.parent) == (pack_hashes([block_hash64(name(3))]), block_hash64(name(7)))


def test_the_whole_cache_as_events_resynchronises_a_reader():
    cache, told = BlockCache(4), HeldBlocks()
    for number, block in enumerate(cache.take(3)):
        cache.name(block, name(number), None)

    told.apply(cache.whole_as_events())

    assert told.digest().count == 3
