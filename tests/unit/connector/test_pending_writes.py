"""A block is pending from the scheduling of the step that fills it until that step is computed."""

from __future__ import annotations

import pytest

from connector.holder.pending_writes import PendingWrites
from tests.unit.connector.holding import BLOCK_TOKENS, step


@pytest.fixture
def pending_writes():
    return PendingWrites(blocks=32, block_size=BLOCK_TOKENS)


def written(pending_writes: PendingWrites) -> list[int]:
    return [block for block in range(32) if pending_writes.writes(block)]


def test_only_blocks_that_a_step_fills_are_pending(pending_writes):
    pending_writes.scheduled(step(new=[("r1", [5, 6, 7, 8], BLOCK_TOKENS, 2 * BLOCK_TOKENS + 3)]))

    assert written(pending_writes) == [6, 7]


def test_blocks_are_pending_until_their_own_step_is_computed(pending_writes):
    first = step(new=[("r1", [5, 6], 0, 2 * BLOCK_TOKENS)])
    second = step(known=[("r1", [7], 2 * BLOCK_TOKENS, BLOCK_TOKENS)])
    pending_writes.scheduled(first)
    pending_writes.scheduled(second)
    assert written(pending_writes) == [5, 6, 7]

    pending_writes.computed(first)
    assert written(pending_writes) == [7]

    pending_writes.computed(second)
    assert written(pending_writes) == []


def test_a_block_is_pending_in_the_step_of_its_last_token(pending_writes):
    pending_writes.scheduled(begin := step(new=[("r1", [5], 0, BLOCK_TOKENS - 2)]))
    pending_writes.computed(begin)
    seen = []
    for computed in (BLOCK_TOKENS - 2, BLOCK_TOKENS - 1, BLOCK_TOKENS):
        pending_writes.scheduled(decode := step(known=[("r1", [6] if computed == BLOCK_TOKENS else [], computed, 1)]))
        seen.append(written(pending_writes))
        pending_writes.computed(decode)

    assert seen == [[], [5], []]


def test_a_resumed_request_writes_only_its_new_blocks(pending_writes):
    pending_writes.scheduled(before := step(new=[("r1", [5, 6], 0, 2 * BLOCK_TOKENS)]))
    pending_writes.computed(before)

    pending_writes.scheduled(step(known=[("r1", [9, 10], 0, BLOCK_TOKENS)], resumed=["r1"]))

    assert written(pending_writes) == [9]


def test_a_request_ended_during_its_step_still_writes(pending_writes):
    pending_writes.scheduled(running := step(new=[("r1", [5], 0, BLOCK_TOKENS)]))
    pending_writes.scheduled(after := step(finished=["r1", "never scheduled"]))
    assert (written(pending_writes), len(pending_writes)) == ([5], 0)

    pending_writes.computed(running)
    pending_writes.computed(after)
    assert written(pending_writes) == []


def test_a_reused_block_is_pending_until_its_last_writer_ends(pending_writes):
    pending_writes.scheduled(first := step(new=[("r1", [5], 0, BLOCK_TOKENS)]))
    pending_writes.scheduled(second := step(new=[("r2", [5], 0, BLOCK_TOKENS)], finished=["r1"]))

    pending_writes.computed(first)
    assert written(pending_writes) == [5]

    pending_writes.computed(second)
    assert written(pending_writes) == []


def test_a_reused_request_id_starts_with_new_blocks(pending_writes):
    pending_writes.scheduled(step(new=[("r1", [5], 0, 1)]))
    pending_writes.scheduled(step(new=[("r1", [8], 0, BLOCK_TOKENS)], finished=["r1"]))

    assert written(pending_writes) == [8]


def test_an_unknown_step_changes_nothing(pending_writes):
    pending_writes.scheduled(step(new=[("r1", [5], 0, BLOCK_TOKENS)]))

    pending_writes.computed(step())

    assert written(pending_writes) == [5]


def test_a_too_short_block_table_raises(pending_writes):
    with pytest.raises(AssertionError, match="r1"):
        pending_writes.scheduled(step(new=[("r1", [5], 0, 2 * BLOCK_TOKENS)]))
