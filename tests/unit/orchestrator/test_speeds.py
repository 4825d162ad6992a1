"""Speeds are found in what engines tell of their steps, whatever was batched together, and are not forgotten."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.orchestrator.planner.speeds import SpeedLearner
from shared.engine_speed import NO_STEPS, Steps
from tests.support.examples import examples

SCALES = st.floats(0.05, 50.0)


def worked(prompt_tokens: float, batch: float, steps: int, *, token_s: float, step_s: float, request_s: float) -> Steps:
    """Some steps, of which each computed a part of a prompt and one token of each completion."""
    prefill_steps = steps if prompt_tokens else 0
    return Steps(
        seconds=prompt_tokens * token_s + (steps * step_s if batch else 0.0) + steps * batch * request_s,
        prefill_steps=float(prefill_steps),
        prefill_tokens=prompt_tokens,
        decode_steps=float(steps if batch else 0),
        decode_requests=steps * batch,
    )


@given(SCALES, st.floats(0.2, 5.0))
@settings(max_examples=examples(40), deadline=None)
def test_an_engine_is_known_after_some_samples_whatever_its_scale_and_proportions(scale: float, proportion: float):
    token_s, step_s, request_s = 2e-4 * scale, 0.01 * scale * proportion, 3e-4 * scale
    learner, dice = SpeedLearner(), random.Random(1)
    for _sample in range(100):
        tokens, batch = dice.choice([(0.0, 2.0 ** dice.uniform(0, 7)), (dice.uniform(1, 4e4), 0.0), (2e4, 32.0)])
        learner.worked(worked(tokens, batch, 1000, token_s=token_s, step_s=step_s, request_s=request_s))

    speeds = learner.speeds()
    assert speeds is not None
    for batch in (1.0, 16.0, 128.0):
        assert speeds.decode_step_of(batch, 0.0) == pytest.approx(step_s + batch * request_s, rel=0.15)
    prompts = worked(3e4, 0.0, 100, token_s=token_s, step_s=step_s, request_s=request_s)
    assert speeds.prefill_s(prompts) == pytest.approx(prompts.seconds, rel=0.15)


def test_what_full_batches_took_is_known_long_after_batches_have_become_small():
    learner = SpeedLearner()
    speed = {"token_s": 1e-4, "step_s": 0.004, "request_s": 5e-4}
    for batch in (64.0, 90.0, 120.0):
        for _sample in range(10):
            learner.worked(worked(0.0, batch, 100, **speed))
    for _sample in range(2000):
        learner.worked(worked(0.0, 8.0, 100, **speed))

    speeds = learner.speeds()
    assert speeds is not None
    assert speeds.decode_step_of(100.0, 0.0) == pytest.approx(0.004 + 100 * 5e-4, rel=0.05)


def test_a_phase_that_was_never_seen_is_as_much_slower_than_usual_as_the_other():
    fast, slow = SpeedLearner(), SpeedLearner()
    for learner, token_s in ((fast, 1e-5), (slow, 1e-3)):
        for _sample in range(10):
            learner.worked(worked(1e5, 0.0, 10, token_s=token_s, step_s=1.0, request_s=1.0))

    speeds = fast.speeds(), slow.speeds()
    assert speeds[0] is not None
    assert speeds[1] is not None
    assert speeds[1].decode_step_s == pytest.approx(100 * speeds[0].decode_step_s, rel=0.1)


@pytest.mark.parametrize(
    "nonsense",
    [
        NO_STEPS,
        Steps(seconds=1.0),
        Steps(seconds=-1.0, decode_steps=10.0),
        Steps(seconds=float("nan"), decode_steps=10.0),
        Steps(seconds=float("inf"), decode_steps=10.0),
        Steps(seconds=1.0, decode_steps=10.0, prefill_tokens=-5.0),
        Steps(seconds=1.0, decode_steps=10.0, prefill_pairs=float("nan")),
    ],
)
def test_nonsense_teaches_nothing(nonsense: Steps):
    learner = SpeedLearner()
    learner.worked(nonsense)

    assert not learner.knows
    assert learner.speeds() is None
