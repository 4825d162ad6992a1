"""A block is being written from the scheduling of the step that fills it until that step is computed."""

from __future__ import annotations

import pytest

from connector.scheduler.in_flight import InFlight
from tests.unit.connector.holding import BLOCK_TOKENS, step


@pytest.fixture
def in_flight():
    return InFlight(blocks=32, block_size=BLOCK_TOKENS)


def written(in_flight: InFlight) -> list[int]:
    return [block for block in range(32) if in_flight.writes(block)]


def test_only_the_blocks_that_a_step_fills_are_watched(in_flight):
    in_flight.scheduled(step(new=[("r1", [5, 6, 7, 8], BLOCK_TOKENS, 2 * BLOCK_TOKENS + 3)]))

    assert written(in_flight) == [6, 7]


def test_blocks_are_there_when_their_step_is_computed_and_not_when_a_later_one_is_scheduled(in_flight):
    first = step(new=[("r1", [5, 6], 0, 2 * BLOCK_TOKENS)])
    second = step(known=[("r1", [7], 2 * BLOCK_TOKENS, BLOCK_TOKENS)])
    in_flight.scheduled(first)
    in_flight.scheduled(second)
    assert written(in_flight) == [5, 6, 7]

    in_flight.computed(first)
    assert written(in_flight) == [7]

    in_flight.computed(second)
    assert written(in_flight) == []


def test_a_block_is_watched_in_the_step_that_writes_its_last_token(in_flight):
    in_flight.scheduled(begin := step(new=[("r1", [5], 0, BLOCK_TOKENS - 2)]))
    in_flight.computed(begin)
    seen = []
    for computed in (BLOCK_TOKENS - 2, BLOCK_TOKENS - 1, BLOCK_TOKENS):
        in_flight.scheduled(decode := step(known=[("r1", [6] if computed == BLOCK_TOKENS else [], computed, 1)]))
        seen.append(written(in_flight))
        in_flight.computed(decode)

    assert seen == [[], [5], []]


def test_a_resumed_request_writes_its_new_blocks_and_not_those_it_lost(in_flight):
    in_flight.scheduled(before := step(new=[("r1", [5, 6], 0, 2 * BLOCK_TOKENS)]))
    in_flight.computed(before)

    in_flight.scheduled(step(known=[("r1", [9, 10], 0, BLOCK_TOKENS)], resumed=["r1"]))

    assert written(in_flight) == [9]


def test_a_request_that_ends_while_its_step_runs_still_writes(in_flight):
    in_flight.scheduled(running := step(new=[("r1", [5], 0, BLOCK_TOKENS)]))
    in_flight.scheduled(after := step(finished=["r1", "never scheduled"]))
    assert (written(in_flight), len(in_flight)) == ([5], 0)

    in_flight.computed(running)
    in_flight.computed(after)
    assert written(in_flight) == []


def test_a_block_given_to_another_request_is_watched_until_the_last_writer_is_done(in_flight):
    in_flight.scheduled(first := step(new=[("r1", [5], 0, BLOCK_TOKENS)]))
    in_flight.scheduled(second := step(new=[("r2", [5], 0, BLOCK_TOKENS)], finished=["r1"]))

    in_flight.computed(first)
    assert written(in_flight) == [5]

    in_flight.computed(second)
    assert written(in_flight) == []


def test_an_id_that_comes_again_begins_with_its_own_blocks(in_flight):
    in_flight.scheduled(step(new=[("r1", [5], 0, 1)]))
    in_flight.scheduled(step(new=[("r1", [8], 0, BLOCK_TOKENS)], finished=["r1"]))

    assert written(in_flight) == [8]


def test_a_step_unknown_here_changes_nothing(in_flight):
    in_flight.scheduled(step(new=[("r1", [5], 0, BLOCK_TOKENS)]))

    in_flight.computed(step())

    assert written(in_flight) == [5]


def test_a_table_too_short_for_what_is_written_is_a_bug_and_says_so(in_flight):
    with pytest.raises(AssertionError, match="r1"):
        in_flight.scheduled(step(new=[("r1", [5], 0, 2 * BLOCK_TOKENS)]))
