"""A block is being written from the scheduling of the step that fills it until that step is computed."""

from __future__ import annotations

import pytest

from connector.holder.pending_writes import PendingWrites
from tests.unit.connector.holding import BLOCK_TOKENS, step


@pytest.fixture
def pending_writes():
    return PendingWrites(blocks=32, block_size=BLOCK_TOKENS)


def written(pending_writes: PendingWrites) -> list[int]:
    return [block for block in range(32) if pending_writes.writes(block)]


def test_only_the_blocks_that_a_step_fills_are_watched(pending_writes):
    pending_writes.scheduled(step(new=[("r1", [5, 6, 7, 8], BLOCK_TOKENS, 2 * BLOCK_TOKENS + 3)]))

    assert written(pending_writes) == [6, 7]


def test_blocks_are_there_when_their_step_is_computed_and_not_when_a_later_one_is_scheduled(pending_writes):
    first = step(new=[("r1", [5, 6], 0, 2 * BLOCK_TOKENS)])
    second = step(known=[("r1", [7], 2 * BLOCK_TOKENS, BLOCK_TOKENS)])
    pending_writes.scheduled(first)
    pending_writes.scheduled(second)
    assert written(pending_writes) == [5, 6, 7]

    pending_writes.computed(first)
    assert written(pending_writes) == [7]

    pending_writes.computed(second)
    assert written(pending_writes) == []


def test_a_block_is_watched_in_the_step_that_writes_its_last_token(pending_writes):
    pending_writes.scheduled(begin := step(new=[("r1", [5], 0, BLOCK_TOKENS - 2)]))
    pending_writes.computed(begin)
    seen = []
    for computed in (BLOCK_TOKENS - 2, BLOCK_TOKENS - 1, BLOCK_TOKENS):
        pending_writes.scheduled(decode := step(known=[("r1", [6] if computed == BLOCK_TOKENS else [], computed, 1)]))
        seen.append(written(pending_writes))
        pending_writes.computed(decode)

    assert seen == [[], [5], []]


def test_a_resumed_request_writes_its_new_blocks_and_not_those_it_lost(pending_writes):
    pending_writes.scheduled(before := step(new=[("r1", [5, 6], 0, 2 * BLOCK_TOKENS)]))
    pending_writes.computed(before)

    pending_writes.scheduled(step(known=[("r1", [9, 10], 0, BLOCK_TOKENS)], resumed=["r1"]))

    assert written(pending_writes) == [9]


def test_a_request_that_ends_while_its_step_runs_still_writes(pending_writes):
    pending_writes.scheduled(running := step(new=[("r1", [5], 0, BLOCK_TOKENS)]))
    pending_writes.scheduled(after := step(finished=["r1", "never scheduled"]))
    assert (written(pending_writes), len(pending_writes)) == ([5], 0)

    pending_writes.computed(running)
    pending_writes.computed(after)
    assert written(pending_writes) == []


def test_a_block_given_to_another_request_is_watched_until_the_last_writer_is_done(pending_writes):
    pending_writes.scheduled(first := step(new=[("r1", [5], 0, BLOCK_TOKENS)]))
    pending_writes.scheduled(second := step(new=[("r2", [5], 0, BLOCK_TOKENS)], finished=["r1"]))

    pending_writes.computed(first)
    assert written(pending_writes) == [5]

    pending_writes.computed(second)
    assert written(pending_writes) == []


def test_an_id_that_comes_again_begins_with_its_own_blocks(pending_writes):
    pending_writes.scheduled(step(new=[("r1", [5], 0, 1)]))
    pending_writes.scheduled(step(new=[("r1", [8], 0, BLOCK_TOKENS)], finished=["r1"]))

    assert written(pending_writes) == [8]


def test_a_step_unknown_here_changes_nothing(pending_writes):
    pending_writes.scheduled(step(new=[("r1", [5], 0, BLOCK_TOKENS)]))

    pending_writes.computed(step())

    assert written(pending_writes) == [5]


def test_a_table_too_short_for_what_is_written_is_a_bug_and_says_so(pending_writes):
    with pytest.raises(AssertionError, match="r1"):
        pending_writes.scheduled(step(new=[("r1", [5], 0, 2 * BLOCK_TOKENS)]))
