"""The block table in Python and the one in C say the same as the plainest of models, whatever they are told."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.state.block_table import EVICTED_MAX, IS_COMPILED, LOST_MAX, TIERS, PythonBlockTable, block_table
from shared.contracts.kv_events import NARROW_MARK, KvTier, pack_hashes
from tests.properties.router.naive_blocks import KINDS, TABLES, NaiveBlocks
from tests.support.examples import examples

HOST = TIERS.index(KvTier.HOST)
ROWS = 5
ROW = st.integers(min_value=0, max_value=ROWS - 1)
TIER = st.integers(min_value=0, max_value=len(TIERS) - 1)
BLOCK = st.one_of(
    st.integers(min_value=0, max_value=9),
    st.sampled_from([one ^ NARROW_MARK for one in range(4)]),
    st.sampled_from([2**63, 2**64 - 1, 2**64 - 2]),
)
BLOCKS = st.lists(BLOCK, max_size=12)


class TableAgainstModel(RuleBasedStateMachine):
    make = PythonBlockTable

    def __init__(self) -> None:
        super().__init__()
        self.table, self.model = type(self).make(), NaiveBlocks(ROWS)

    @rule(row=ROW, tier=TIER, blocks=BLOCKS, packed=st.booleans())
    def a_row_stores(self, row, tier, blocks, packed):
        self.table.store(row, tier, pack_hashes(blocks) if packed else blocks)
        self.model.store(row, tier, blocks)

    @rule(row=ROW, tier=TIER, blocks=BLOCKS, packed=st.booleans())
    def a_row_removes(self, row, tier, blocks, packed):
        self.table.remove(row, tier, pack_hashes(blocks) if packed else blocks)
        self.model.remove(row, tier, blocks)

    @rule(tier=TIER, blocks=BLOCKS, packed=st.booleans())
    def changes_are_expected(self, tier, blocks, packed):
        self.table.expect(tier, pack_hashes(blocks) if packed else blocks)

    @rule(row=ROW)
    def a_row_is_cleared(self, row):
        self.table.clear(row)
        self.model.clear(row)

    @rule(chain=st.lists(BLOCK, max_size=16))
    def chains_are_matched(self, chain):
        self.model.assert_matched_by(self.table, chain, KINDS)

    @rule(
        chain=BLOCKS,
        first=st.integers(min_value=0, max_value=15),
        end=st.integers(min_value=0, max_value=15),
        allowed=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    )
    def chains_are_covered(self, chain, first, end, allowed):
        found = self.table.cover(chain, first, end, np.array(allowed))
        assert found == self.model.cover(chain, first, min(end, len(chain)), allowed)

    @rule()
    def pairs_are_counted(self):
        assert self.table.size() == self.model.pairs()

    @invariant()
    def every_row_is_known_block_by_block(self):
        self.model.assert_told_by(self.table)


class NativeTableAgainstModel(TableAgainstModel):
    make = block_table


TableAgainstModel.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
NativeTableAgainstModel.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
TestThePythonTable = TableAgainstModel.TestCase
if IS_COMPILED:
    TestTheNativeTable = NativeTableAgainstModel.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("make", TABLES)
@pytest.mark.parametrize(("rows", "chains"), [(3, 400), (150, 60)])
def test_a_fleet_that_lives_through_much_is_known_block_by_block(make, rows, chains):
    """Large enough for the table to grow and shrink, and for sets of holders to take every form they have."""
    chance = random.Random(rows)
    pool = [[chance.getrandbits(64) for _ in range(chance.randint(1, 150))] for _ in range(chains)]
    table, model = make(), NaiveBlocks(rows)
    for turn in range(1500):
        row, tier = chance.randrange(rows), chance.choice((0, 0, 0, 1, 2, 3, 3))
        chain = chance.choice(pool)[: chance.randint(1, 150)]
        deed = chance.random()
        if deed < 0.02 or (turn == 1000 and rows < 10):
            for one in [row] if deed < 0.02 else range(rows):
                table.clear(one)
                model.clear(one)
        elif deed < 0.3:
            table.remove(row, tier, pack_hashes(chain[len(chain) // 2 :]))
            model.remove(row, tier, chain[len(chain) // 2 :])
        else:
            table.store(row, tier, pack_hashes(chain))
            model.store(row, tier, chain)
        if turn % 10 == 0:
            model.assert_matched_by(table, chain, [KINDS[turn // 10 % len(KINDS)]])
            allowed = [chance.random() < 0.5 for _ in range(rows)]
            found = table.cover(pack_hashes(chain), 1, len(chain), np.array(allowed))
            assert found == model.cover(chain, 1, len(chain), allowed)
        if turn % 300 == 0:
            model.assert_told_by(table)
    model.assert_told_by(table)
    assert table.size() == model.pairs()


@pytest.mark.parametrize("make", TABLES)
def test_a_table_that_was_emptied_holds_nothing(make):
    table = make()
    chains = [pack_hashes(range(begin, begin + 5000)) for begin in range(0, 100_000, 5000)]
    for row, chain in enumerate(chains):
        table.store(row, 0, chain)
    for row, chain in enumerate(chains):
        table.remove(row, 0, chain) if row % 2 else table.clear(row)

    assert [table.count(row) for row in range(len(chains))] == [0] * len(chains)
    assert table.size() == 0


@pytest.mark.skipif(not IS_COMPILED, reason="memory of Python's table is Python's")
def test_a_large_table_returns_memory_that_its_blocks_do_not_need():
    chance, table = np.random.default_rng(1), block_table()
    kept, gone = (chance.integers(1, 2**63, size=size, dtype=np.uint64) for size in (100_000, 1_900_000))
    pieces = [part.astype(">u8").tobytes() for part in np.array_split(gone, 100)]
    table.store(0, 0, kept.astype(">u8").tobytes())
    before, used_before = resident_bytes(), table.bytes_used()
    used, unused = [], []
    for change in (table.store, table.remove):
        for piece in pieces:
            change(1, 0, piece)
            used.append(table.bytes_used() - used_before)
            unused.append(resident_bytes() - before - used[-1])

    assert max(unused) < 0.85 * max(used)  # While it grows: each shard is copied by itself.
    assert used[-1] < 0.2 * max(used)
    assert (table.count(0), table.count(1), table.size()) == (len(kept), 0, len(kept))
    assert table.xor(0) == int(np.bitwise_xor.reduce(kept))
    assert all(map(table.held, kept[::1000].tolist()))
    assert not any(map(table.held, gone[::1000].tolist()))


def resident_bytes() -> int:
    """RSS of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("make", TABLES)
def test_of_large_caches_a_sample_of_the_evictions_is_counted(make):
    """Half of the evicted blocks are stored again, by another row."""
    chance, table = random.Random(1), make()
    blocks = [chance.getrandbits(64) for _ in range(7 * LOST_MAX)]
    table.store(0, 0, blocks)
    for begin in range(0, LOST_MAX, 512):
        table.remove(0, 0, blocks[begin : begin + 512])
        table.store(1, 0, blocks[begin : begin + 256])
    (evicted, _), (_, restored) = table.evictions(0), table.evictions(1)

    assert evicted == pytest.approx(LOST_MAX / 8, rel=0.1)
    assert restored == pytest.approx(evicted / 2, rel=0.1)


@pytest.mark.parametrize("make", TABLES)
def test_old_evictions_are_forgotten_alike_of_all_rows(make):
    """The first blocks are stored again, by another row, later ones are not."""
    table = make()
    for turn in range(128):
        blocks = list(range(turn * 1024 + 1, (turn + 1) * 1024 + 1))
        table.store(0, 0, blocks)
        table.remove(0, 0, blocks)
        if turn < 8:
            table.store(1, 0, blocks)
            assert (table.evictions(0), table.evictions(1)) == ((1024 * (turn + 1), 0), (0, 1024 * (turn + 1)))

    assert (table.evictions(0), table.evictions(1)) == ((EVICTED_MAX // 2, 0), (0, 1024))


@pytest.mark.parametrize("make", TABLES)
def test_a_block_that_stays_in_host_memory_is_not_lost(make):
    table = make()
    table.store(0, HOST, [1])
    for _ in range(3):
        table.store(0, 0, [1, 2])
        table.remove(0, 0, [1, 2])

    assert table.evictions(0) == (6, 2)


@pytest.mark.parametrize("make", TABLES)
def test_torn_hashes_change_nothing(make):
    table = make()
    for change in (table.store, table.remove):
        with pytest.raises(ValueError, match="whole number"):
            change(0, 0, b"\0" * 15)
    if make is not PythonBlockTable:
        with pytest.raises(ValueError, match="whole number"):
            table.expect(0, b"\0" * 15)

    assert (table.count(0), table.size()) == (0, 0)


@pytest.mark.parametrize("make", TABLES)
def test_rows_beyond_the_requested_ones_are_left_out(make):
    table, depths = make(), np.full(2, -1, np.int32)
    for row in (0, 1, 2, 40):
        table.store(row, 0, [1, 2, 3])

    table.depths([1, 2, 3, 4], depths)

    assert depths.tolist() == [3, 3]
    assert table.cover([1, 2, 3], 0, 3, np.array([False, False, True])) == [(2, 0, 3)]
