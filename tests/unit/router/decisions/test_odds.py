"""The probability of a target is the share of the newest requests with such a prediction that would have met it."""

from __future__ import annotations

import math

import pytest

from services.router.decisions.odds import ALL_MAX, MODELS_MAX, NEWEST_MAX, SAMPLES_MIN, UNKNOWN, Newest, Odds, Outcomes


def learned(pairs: list[tuple[float, float]], *, are_ratios: bool) -> Outcomes:
    outcomes = Outcomes(are_ratios=are_ratios)
    for predicted_s, measured_s in pairs:
        outcomes.learn(predicted_s, measured_s)
    return outcomes


def test_it_is_unknown_until_enough_requests_have_ended():
    outcomes = learned([(1.0, 1.0)] * (SAMPLES_MIN - 1), are_ratios=True)
    assert outcomes.probability(1.0, 2.0) == UNKNOWN

    outcomes.learn(1.0, 1.0)

    assert outcomes.probability(1.0, 2.0) > 0.95


def test_first_tokens_keep_their_ratio_to_the_prediction():
    outcomes = learned([(1.0, 1.0 + number / 100) for number in range(100)], are_ratios=True)

    assert outcomes.probability(1.5, 1.5 * 1.6) == pytest.approx(0.6, abs=0.02)
    assert outcomes.probability(1.5, 1.4) < 0.02
    assert outcomes.probability(1.5, 0.0) == outcomes.probability(1.5, -1.0) == 0.0


def test_times_between_tokens_keep_near_the_target_whatever_was_predicted():
    outcomes = learned([(0.1 + number / 1000, 0.097) for number in range(100)], are_ratios=False)

    assert outcomes.probability(0.15, 0.1) > 0.95
    assert outcomes.probability(0.15, 0.096) < 0.05


def test_predictions_of_one_octave_are_told_apart_from_others():
    early, late = [(0.3, 0.3)] * 200, [(3.0, 6.0)] * 200
    outcomes = learned([*early, *late], are_ratios=True)

    assert outcomes.probability(0.3, 0.4) > 0.9
    assert outcomes.probability(3.0, 4.0) < 0.1
    assert outcomes.probability(30.0, 40.0) == pytest.approx(0.5, abs=0.01)


def test_old_outcomes_are_forgotten():
    outcomes = learned([(1.0, 3.0)] * NEWEST_MAX + [(1.0, 0.5)] * ALL_MAX, are_ratios=True)

    assert outcomes.probability(1.0, 1.0) > 0.99


def test_only_the_newest_numbers_are_kept_in_order():
    newest = Newest(3)
    for number in (5.0, 1.0, 4.0, 2.0, 3.0):
        newest.add(number)

    assert [newest.up_to(limit) for limit in (1.5, 2.0, 3.5, 4.0)] == [0, 1, 2, 3]
    assert len(newest) == 3


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_odd_numbers_of_workers_do_no_harm(odd: float):
    outcomes = learned([(1.0, 1.0)] * 100, are_ratios=True)
    outcomes.learn(odd, 1.0)
    outcomes.learn(1.0, odd)

    assert 0.0 <= outcomes.probability(odd, 1.0) <= 1.0
    assert outcomes.probability(1.0, 1.5) > 0.9


def test_models_are_bounded():
    odds = Odds()
    first = odds.of("model-0")
    for number in range(1, MODELS_MAX + 1):
        odds.of(f"model-{number}")

    assert odds.of("model-1") is odds.of("model-1")
    assert odds.of("model-0") is not first
