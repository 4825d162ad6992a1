"""Gaps between prompts, where steps with prompt tokens are longer than the target between tokens."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from services.router.admission.pacing import GAP_MAX, OWED_STEPS, best_gap, missed
from services.router.admission.queues import QueueEntry
from tests.unit.router.engines import Engine, Engines

SHORT_S, CHUNK_S = 0.012, 0.1
"""A step without prompt tokens, and what a prompt of 100 tokens adds to one."""
ITL_S = 0.1
ANSWER = {"tokens_out": 28, "itl_s": ITL_S}


def drawn_miss(limit: float, mixed: float, tokens_out: float, rng: random.Random, answers: int = 20_000) -> float:
    """The share of drawn answers with more long steps than the limit allows."""
    misses = 0
    for _ in range(answers):
        steps = 1
        while rng.random() < 1.0 - 1.0 / tokens_out:
            steps += 1
        misses += sum(rng.random() < mixed for _ in range(steps)) > limit * steps
    return misses / answers


@pytest.mark.parametrize(("mixed", "tokens_out"), [(0.5, 8), (0.9, 28), (0.97, 100)])
def test_the_predicted_misses_are_exact_where_one_short_step_is_enough(mixed, tokens_out):
    predicted = missed(0.999_999, mixed, tokens_out)

    assert predicted == pytest.approx(drawn_miss(0.999_999, mixed, tokens_out, random.Random(1)), abs=0.01)


@pytest.mark.parametrize(("limit", "mixed", "tokens_out"), [(0.7, 0.5, 28), (0.9, 0.8, 100), (0.4, 0.3, 250)])
def test_the_predicted_misses_are_no_less_than_those_drawn(limit, mixed, tokens_out):
    drawn = drawn_miss(limit, mixed, tokens_out, random.Random(2), 4_000)

    assert drawn - 0.02 < missed(limit, mixed, tokens_out) < 1.0


def test_steps_within_the_target_need_no_gap():
    assert best_gap(1.0, 0.1, 28.0) == 0.0
    assert best_gap(1.01, 0.1, 28.0) > 0.0


def test_shorter_answers_need_longer_gaps():
    gaps = [best_gap(1.03, 0.12, float(tokens_out)) for tokens_out in (8, 28, 256)]

    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 2 * gaps[2] > 0.0


@pytest.mark.parametrize("long", [1.01, 1.5, 5.0, 100.0])
@pytest.mark.parametrize("short", [0.0, 0.5, 0.99, 1.0, 2.0, 200.0])
def test_gaps_are_bounded(long, short):
    assert 0.0 <= best_gap(long, short, 28.0) <= GAP_MAX


def begun_at(engines: Engines, count: int, **request) -> list[float]:
    """When each of so many prompts begins that arrive together."""
    entries = [engines.offer(100, **request) for _ in range(count)]
    engines.run()
    return [engines.placed_at[entry] for entry in entries]


def test_prompts_leave_gaps_where_steps_with_them_are_too_long():
    engine = Engine("w1", step_s=SHORT_S, prompt_step_s=CHUNK_S)
    gap = best_gap(round((SHORT_S + CHUNK_S) / 0.098, 2), round(SHORT_S / 0.098, 2), 28.0)

    times = begun_at(Engines(engine), 40, **ANSWER)

    assert gap > 0.05

    between_s = [after - before for before, after in pairwise(times[20:])]
    assert between_s == pytest.approx([0.1 * (1.0 + gap)] * len(between_s))


@pytest.mark.parametrize("itl_s", [0.2, math.inf], ids=["long enough", "none"])
def test_prompts_leave_no_gaps_within_the_target(itl_s):
    engine = Engine("w1", step_s=SHORT_S, prompt_step_s=CHUNK_S)

    times = begun_at(Engines(engine), 40, tokens_out=28, itl_s=itl_s)

    between_s = [after - before for before, after in pairwise(times[20:])]
    assert between_s == pytest.approx([0.1] * len(between_s))


def test_short_prompts_leave_no_gaps():
    engine = Engine("w1", step_s=SHORT_S, prompt_step_s=CHUNK_S)
    engines = Engines(engine)
    entries = [engines.offer(50, **ANSWER) for _ in range(40)]
    engines.run()

    assert engines.placed_at[entries[-1]] == pytest.approx(39 * 0.05 - 0.25, abs=0.051)


def test_a_wrong_prediction_holds_prompts_back_for_a_few_steps_only():
    engine = Engine("w1", step_s=SHORT_S, prompt_step_s=CHUNK_S)
    engines = Engines(engine, engine_queue_s_max=0.25)
    engines.offer(100_000, **ANSWER)
    engine.free_at = 0.5  # it had nearly all of that cached

    waiting = engines.offer(100, **ANSWER)
    engines.run()

    assert engines.placed_at[waiting] <= 0.5 + OWED_STEPS * SHORT_S
    assert math.isfinite(engines.placed_at[waiting])


def after_a_gap(busy_s: float) -> tuple[Engines, QueueEntry, float]:
    """A worker that must not get its next prompt for a moment, beside one that is busy for ``busy_s`` from then on; a
    request that arrives then.
    """
    first, second = (Engine(name, step_s=SHORT_S, prompt_step_s=CHUNK_S) for name in ("w1", "w2"))
    engines = Engines(first, second)
    second.free_at = 100.0
    for _ in range(40):
        engines.offer(100, **ANSWER)
    engines.run()
    assert engines.now == first.free_at
    second.free_at = engines.now + busy_s
    return engines, engines.offer(100, **ANSWER), engines.now


def test_a_request_begins_elsewhere_where_its_first_token_comes_no_later():
    engines, entry, now = after_a_gap(busy_s=0.001)
    engines.run()

    assert dict(engines.ends)[entry].decode.record.worker_id == "w2"
    assert engines.placed_at[entry] == now
    assert (entry.gap_worker, entry.gap_step_s) == ("", 0.0)


def test_a_request_waits_for_the_gap_where_others_would_take_longer():
    engines, entry, now = after_a_gap(busy_s=0.24)
    engines.run()

    assert dict(engines.ends)[entry].decode.record.worker_id == "w1"
    assert engines.placed_at[entry] > now
    assert (entry.gap_worker, entry.gap_step_s) == ("w1", SHORT_S + CHUNK_S)
