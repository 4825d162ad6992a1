"""A block is pending from the scheduling of the step that fills it until that step is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.holder.pending_writes import PendingWrites
from tests.unit.connector.holding import BLOCK_TOKENS, Step, chain

BLOCKS = 32


@pytest.fixture
def pending_writes():
    return PendingWrites(BLOCKS)


def written(pending_writes: PendingWrites) -> list[int]:
    return [block for block in range(BLOCKS) if pending_writes.writes(block)]


def scheduled(pending_writes: PendingWrites, *blocks: int) -> Step:
    """A step that fills these blocks."""
    pending_writes.begin_step()
    for block in blocks:
        pending_writes.named(block)
    pending_writes.scheduled(step := Step())
    return step


def test_only_blocks_named_while_a_step_is_scheduled_are_pending(pending_writes):
    pending_writes.named(4)
    scheduled(pending_writes, 6, 7)
    pending_writes.named(9)

    assert written(pending_writes) == [6, 7]


def test_blocks_are_pending_until_their_own_step_is_computed(pending_writes):
    first = scheduled(pending_writes, 5, 6)
    second = scheduled(pending_writes, 7)
    assert written(pending_writes) == [5, 6, 7]

    pending_writes.computed(first)
    assert written(pending_writes) == [7]

    pending_writes.computed(second)
    assert written(pending_writes) == []


def test_a_reused_block_is_pending_until_its_last_writer_ends(pending_writes):
    first = scheduled(pending_writes, 5)
    second = scheduled(pending_writes, 5)

    pending_writes.computed(first)
    assert written(pending_writes) == [5]

    pending_writes.computed(second)
    assert written(pending_writes) == []


def test_a_pending_block_named_again_between_steps_stays_pending(pending_writes):
    step = scheduled(pending_writes, 5)

    pending_writes.named(5)
    assert written(pending_writes) == [5]

    pending_writes.computed(step)
    assert written(pending_writes) == []


def test_an_unknown_step_changes_nothing(pending_writes):
    step = scheduled(pending_writes, 5)

    pending_writes.computed(Step())
    assert written(pending_writes) == [5]

    pending_writes.computed(step)
    assert written(pending_writes) == []


def test_every_way_in_which_vllm_names_a_block_is_noted(pending_writes):
    pool = pytest.importorskip("vllm.v1.core.block_pool").BlockPool(BLOCKS, True, BLOCK_TOKENS)
    pending_writes.watch(pool, names_again=True)
    full, partial, copy = pool.get_new_blocks(3)
    request = SimpleNamespace(block_hashes=chain(2))
    pending_writes.begin_step()

    pool.cache_full_blocks(request, [full], 0, 1, BLOCK_TOKENS, 0)
    pool.cache_partial_block(request, partial, 2 * BLOCK_TOKENS, 0, 4 * BLOCK_TOKENS)
    pending_writes.scheduled(Step())
    assert written(pending_writes) == [full.block_id, partial.block_id]

    pending_writes.begin_step()
    pool.move_block_hashes(partial, copy)
    pending_writes.scheduled(Step())
    assert written(pending_writes) == [full.block_id, partial.block_id, copy.block_id]


def test_a_block_that_gets_its_name_again_is_not_written_again(pending_writes):
    pool = pytest.importorskip("vllm.v1.core.block_pool").BlockPool(BLOCKS, True, BLOCK_TOKENS)
    pending_writes.watch(pool, names_again=True)
    (partial,) = pool.get_new_blocks(1)
    for number in range(2):
        step = Step()
        pending_writes.begin_step()
        pool.cache_partial_block(SimpleNamespace(block_hashes=chain(2)), partial, 2 * BLOCK_TOKENS, 0, 4 * BLOCK_TOKENS)
        pending_writes.scheduled(step)
        assert written(pending_writes) == ([] if number else [partial.block_id])
        pending_writes.computed(step)
