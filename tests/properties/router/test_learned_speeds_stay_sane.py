"""Whatever an engine or a worker reports, the speeds learned from it can be computed with."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from services.router.state.worker_speeds import SpeedOf
from shared.contracts.load import EngineSpeed, StepTotals
from shared.engine_speed.learner import SpeedLearner, combined, is_valid
from shared.engine_speed.steps import DEFAULT_STEP_TIMES, Steps, StepTimeModel
from tests.contracts.examples import strategy

COUNTS = st.integers(0, 10**9) | st.integers(-5, 2**63)
DURATIONS = st.floats(0.0, 1e4) | st.floats(allow_nan=True, allow_infinity=True)
TOTALS = st.builds(
    StepTotals,
    seconds=DURATIONS,
    prefill_steps=COUNTS,
    prefill_tokens=COUNTS,
    prefill_pairs=DURATIONS,
    decode_steps=COUNTS,
    decode_requests=COUNTS,
    decode_context_tokens=COUNTS,
)
CLAIMS = st.lists(
    st.tuples(st.just("published"), strategy(EngineSpeed))
    | st.tuples(st.just("transfer"), st.tuples(COUNTS, DURATIONS, st.booleans()))
    | st.tuples(st.just("transit"), DURATIONS),
    max_size=60,
)


def claim(speed: SpeedOf, kind: str, what) -> None:
    if kind == "published":
        speed.published(what)
    elif kind == "transfer":
        speed.transfer_took(what[0], what[1], requested=what[2])
    else:
        speed.transit_took(what)


@given(st.lists(TOTALS, max_size=60))
def test_whatever_an_engine_reports_its_estimate_is_valid(reports):
    learner = SpeedLearner()
    for totals in reports:
        learner.observe(totals)
        learner.learn(Steps.between(StepTotals(), totals))

        if learner.speed is not None:
            assert is_valid(learner.speed)
            both = combined([learner.speed, learner.speed])
            assert both is not None
            assert is_valid(both)


@given(st.lists(TOTALS, max_size=60))
def test_equal_reports_give_equal_estimates(reports):
    one, other = SpeedLearner(), SpeedLearner()
    for totals in reports:
        one.observe(totals)
        other.observe(totals)

    assert one.speed == other.speed


@given(CLAIMS)
def test_every_number_of_placement_is_finite_and_none_is_negative(claims):
    peers = SpeedOf()
    speed = SpeedOf(peers)
    for kind, what in claims:
        claim(speed, kind, what)

        for known in (speed.now(), peers.now(), SpeedOf(peers).now()):
            assert all(math.isfinite(value) and value >= 0.0 for value in astuple(known))


STEPS = st.builds(
    Steps,
    prefill_steps=st.integers(1, 4),
    prefill_tokens=st.integers(1, 16_000),
    prefill_pairs=st.floats(0.0, 1e8),
    decode_steps=st.integers(1, 50),
    decode_requests=st.integers(50, 3000),
    decode_context_tokens=st.integers(0, 10_000_000),
    seconds=st.floats(0.001, 10.0),
)


@given(STEPS)
def test_one_sample_brings_the_prediction_of_it_near_to_it(step):
    learner = SpeedLearner()

    learner.learn(step)

    assert learner.speed is not None
    predicted, assumed = (
        sum(time * amount for time, amount in zip(times, step.work(), strict=True))
        for times in (StepTimeModel.of(learner.speed), DEFAULT_STEP_TIMES)
    )
    before, after = abs(math.log(step.seconds / assumed)), abs(math.log(step.seconds / predicted))
    assert after <= max(0.3, 2 / 3 * before)
