"""Engines' speeds out of nothing but the sums that they report."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.report.step_time import ROWS_MIN, StepLaw
from shared.engine_speed import Steps, StepTimeModel

TRUE = StepTimeModel(prefill_step_s=0.002, prefill_token_s=4e-5, decode_step_s=0.008, decode_request_s=5e-5)


def did(law: StepTimeModel, prompts: float, tokens: float, steps: float, completions: float) -> Steps:
    work = (prompts, tokens, 50.0 * tokens, steps, completions, 900.0 * completions)
    return Steps(sum(part * amount for part, amount in zip(law, work, strict=True)), *work)


def learned(
    rows: int = 200, batches: tuple[int, int] = (1, 64), noise: float = 0.0, law: StepTimeModel = TRUE
) -> StepLaw:
    chance, of = random.Random(7), StepLaw()
    for number in range(rows):
        steps, prompts = chance.randint(20, 60), chance.randint(0, 5)
        done = did(law, prompts, prompts * chance.randint(50, 2000), steps, steps * chance.randint(*batches))
        seconds = done.seconds * (1 + noise * chance.uniform(-1, 1))
        of.add(Steps(seconds, *done.work()), float(number))
    return of


def test_the_law_is_found():
    (law,) = learned().laws()

    assert law == pytest.approx(TRUE, rel=1e-6)


def test_the_law_is_found_in_noise():
    (law,) = learned(noise=0.1).laws()

    assert law.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.2)
    assert law.decode_step_s == pytest.approx(TRUE.decode_step_s, rel=0.2)
    assert law.decode_request_s == pytest.approx(TRUE.decode_request_s, rel=0.4)


def test_batches_that_are_all_alike_leave_two_laws_which_agree_on_what_was_seen():
    all_base, all_requests = learned(batches=(8, 8)).laws()

    seen_s = TRUE.decode_step_s + 8 * TRUE.decode_request_s
    assert (all_base.decode_request_s, all_requests.decode_step_s) == (0.0, 0.0)
    assert all_base.decode_step_s == pytest.approx(seen_s, rel=0.01)
    assert 8 * all_requests.decode_request_s == pytest.approx(seen_s, rel=0.01)


def test_little_is_no_law():
    assert learned(rows=ROWS_MIN - 1).laws() == ()
    assert StepLaw().laws() == ()


def test_engines_that_only_compute_prompts_say_nothing_of_completions():
    of = StepLaw()
    for number in range(100):
        of.add(Steps(0.1, 2.0, 100.0 + number), float(number))

    assert of.laws() == ()


def test_what_changed_is_learned_again():
    of = learned(rows=500)
    slower = StepTimeModel(*(2 * part for part in TRUE))
    for number in range(20_000):
        steps = 20 + number % 40
        of.add(did(slower, 1, 500 + number % 700, steps, steps * (1 + number % 50)), 500 + 0.5 * number)

    (law,) = of.laws()
    assert law == pytest.approx(slower, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 100), *[st.integers(0, 1000)] * 6), max_size=60))
def test_whatever_is_reported_nothing_is_negative_and_nothing_fails(rows):
    of = StepLaw()
    for number, row in enumerate(rows):
        of.add(Steps(*row), float(number))

    for law in of.laws():
        assert all(math.isfinite(part) and part >= 0 for part in law)
