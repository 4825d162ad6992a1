"""How much of a step recomputes get, from what steps took."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import pytest

from connector.scheduler.recompute_share import GROWTH_MIN, SLOWED_S_MAX, STEPS_MAX, TOKENS_MIN, RecomputeShare

DECODE_S, TOKEN_S = 0.010, 0.000_05
NEEDED = 10_000


def run(share: RecomputeShare, at: float, prompt_tokens: int, *, decode_s: float = DECODE_S, token_s: float = TOKEN_S):
    """One step; when it ended."""
    share.made(prompt_tokens, at)
    ended_at = at + decode_s + prompt_tokens * token_s
    share.ended(ended_at)
    return ended_at


@pytest.fixture
def learned() -> RecomputeShare:
    """The share of an engine that has decoded and computed prompts."""
    share, at = RecomputeShare(), 100.0
    for tokens in (0, 0, 0, 500, 0, 500):
        at = run(share, at, tokens)
    return share


def step_s(share: RecomputeShare, target_s: float) -> float:
    """How long a step takes with the share that it allows."""
    share.begin(target_s=target_s)
    return DECODE_S + share.allow("r", NEEDED, 200.0) * TOKEN_S


def test_a_step_with_recomputes_ends_within_the_shortest_target(learned):
    assert 0.025 < step_s(learned, 0.030) < 0.030


def test_without_a_target_a_step_is_fifteen_percent_longer(learned):
    assert step_s(learned, inf) == pytest.approx(1.15 * DECODE_S, abs=2 * TOKEN_S)


def test_a_target_that_a_decode_step_misses_leaves_a_share(learned):
    assert step_s(learned, 0.001) == pytest.approx(max(GROWTH_MIN * DECODE_S, DECODE_S + TOKENS_MIN * TOKEN_S))


@pytest.mark.parametrize(("target_s", "as_with"), [(nan, inf), (-1.0, 0.0), (1e308, 1e6)])
def test_a_target_that_is_none_does_no_harm(learned, target_s, as_with):
    assert step_s(learned, target_s) == step_s(learned, as_with)


def test_nothing_is_bounded_without_a_ready_request(learned):
    learned.begin(target_s=None)

    assert learned.allow("r", NEEDED, 200.0) == NEEDED
    assert not learned.slowed


def test_before_anything_is_learned_the_share_is_the_least():
    share = RecomputeShare()
    share.begin(target_s=1.0)

    assert share.allow("r", NEEDED, 0.0) == TOKENS_MIN


def test_all_recomputes_of_a_step_share_it_and_the_first_gets_what_it_needs(learned):
    whole = int(learned.tokens(0.030))
    learned.begin(target_s=0.030)

    assert [learned.allow(name, needed, 200.0) for name, needed in (("a", 100), ("b", NEEDED), ("c", NEEDED))] == [
        100,
        whole - 100,
        0,
    ]
    assert set(learned.slowed) == {"b", "c"}


def test_the_share_follows_an_engine_that_gets_slower(learned):
    at = 200.0
    for _time in range(100):
        at = run(learned, at, 0, decode_s=2 * DECODE_S)
        at = run(learned, at, 100, decode_s=2 * DECODE_S)

    assert learned.tokens(0.030) == pytest.approx(0.007 / TOKEN_S, rel=0.05)


def test_a_step_in_which_the_process_did_not_run_hardly_counts(learned):
    before = learned.tokens(0.030)
    run(learned, 200.0, 0, decode_s=5.0)

    assert 0.6 * before < learned.tokens(0.030) < before


def test_a_step_that_is_made_while_another_is_computed_is_timed_from_the_end_of_that():
    share, ended_at = RecomputeShare(), 100.0
    steps = [0, 500] * 20
    share.made(steps[0], ended_at)
    for tokens, following in pairwise(steps):
        share.made(following, ended_at)
        ended_at += DECODE_S + tokens * TOKEN_S
        share.ended(ended_at)

    assert share.tokens(0.030) == pytest.approx(0.017 / TOKEN_S, rel=0.01)


def test_a_recompute_that_was_slowed_for_long_is_no_longer_bounded(learned):
    learned.begin(target_s=0.030)
    learned.allow("r", NEEDED, 200.0)

    assert learned.allow("r", NEEDED, 200.0 + SLOWED_S_MAX - 0.1) < NEEDED
    assert learned.allow("r", NEEDED, 200.0 + SLOWED_S_MAX + 0.1) == NEEDED


def test_the_time_in_which_a_recompute_was_slowed_is_told_once(learned):
    learned.begin(target_s=0.030)
    for at in (200.0, 200.5, 201.0):
        learned.allow("r", NEEDED, at)
    learned.begin(target_s=None)
    learned.allow("r", NEEDED, 205.0)

    assert learned.finished("r") == 1.0
    assert learned.finished("r") == 0.0


def test_steps_without_an_end_take_no_memory():
    share = RecomputeShare()
    for number in range(2 * STEPS_MAX):
        share.made(0, float(number))

    for number in range(2 * STEPS_MAX):
        share.ended(1000.0 + number)
    assert share.tokens(inf) == TOKENS_MIN
