"""The step-time models that engines' published speed leaves open."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.aggregated_estimate import SAMPLES_MIN, step_time_models
from shared.contracts.load import EngineSpeed
from shared.engine_speed.learner import SpeedLearner
from shared.engine_speed.steps import NO_STEPS, Steps, StepTimeModel

TRUE = StepTimeModel(prefill_step_s=0.002, prefill_token_s=4e-5, decode_step_s=0.008, decode_request_s=5e-5)


def did(times: StepTimeModel, prompts: float, tokens: float, steps: float, requests: float) -> Steps:
    work = (prompts, tokens, 50.0 * tokens, steps, requests, 900.0 * requests)
    return Steps(sum(time * amount for time, amount in zip(times, work, strict=True)), *work)


def learned(
    samples: int = 200, batches: tuple[int, int] = (1, 64), noise: float = 0.0, times: StepTimeModel = TRUE
) -> tuple[EngineSpeed | None, Steps]:
    """What an engine publishes after some samples, and its work."""
    chance, learner, work = random.Random(7), SpeedLearner(), NO_STEPS
    for _ in range(samples):
        steps, prompts = chance.randint(20, 60), chance.randint(0, 5)
        done = did(times, prompts, prompts * chance.randint(50, 2000), steps, steps * chance.randint(*batches))
        seconds = done.seconds * (1 + noise * chance.uniform(-1, 1))
        learner.learn(Steps(seconds, *done.work()))
        work += done
    return learner.speed, work


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_varied_batches_leave_one_model(noise: float):
    (times,) = step_time_models(*learned(noise=noise))

    for batch in (1, 30, 64):
        assert times.decode_step_of(batch, 0.0) == pytest.approx(TRUE.decode_step_of(batch, 0.0), rel=0.1)
    tokens = Steps(prefill_steps=1, prefill_tokens=2000, prefill_pairs=100_000)
    assert times.prefill_s(tokens) == pytest.approx(TRUE.prefill_s(tokens), rel=0.1)


def test_equal_batches_leave_two_models_that_agree_on_those_batches():
    cheap, costly = step_time_models(*learned(batches=(8, 8)))

    step_s = TRUE.decode_step_of(8, 0.0)
    assert cheap.decode_step_of(8, 0.0) == pytest.approx(step_s, rel=0.05)
    assert costly.decode_step_of(8, 0.0) == pytest.approx(step_s, rel=0.05)
    assert cheap.decode_request_s < TRUE.decode_request_s < costly.decode_request_s
    assert costly.decode_step_of(64, 0.0) > 2 * cheap.decode_step_of(64, 0.0)


def test_few_samples_are_no_model():
    assert step_time_models(*learned(samples=int(SAMPLES_MIN) - 1)) == ()
    assert step_time_models(None, NO_STEPS) == ()


def test_prefill_samples_alone_are_no_model():
    learner = SpeedLearner()
    for number in range(100):
        learner.learn(Steps(0.1, 2.0, 100.0 + number))

    assert step_time_models(learner.speed, NO_STEPS) == ()


@given(st.lists(st.tuples(st.floats(0, 100), *[st.integers(0, 1000)] * 6), min_size=25, max_size=60))
def test_no_report_makes_a_parameter_negative(rows):
    learner, work = SpeedLearner(), NO_STEPS
    for row in rows:
        learner.learn(Steps(*row))
        work += Steps(*row)

    for times in step_time_models(learner.speed, work):
        assert all(0.0 <= time < float("inf") for time in times)
