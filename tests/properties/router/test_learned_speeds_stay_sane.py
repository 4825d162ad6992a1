"""Whatever workers claim to have measured, what is learned of it can be computed with."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.router.state.engine_speed import EngineSpeed
from services.router.state.speed_learner import Learner
from shared.contracts.load import StepTotals
from shared.engine_speed import Steps

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
    st.tuples(st.just("told"), TOTALS)
    | st.tuples(st.just("worked"), TOTALS)
    | st.tuples(st.just("transfer"), st.tuples(COUNTS, DURATIONS, st.booleans()))
    | st.tuples(st.just("way"), DURATIONS),
    max_size=60,
)


def claim(learner: Learner, kind: str, what) -> None:
    if kind == "told":
        learner.told(what)
    elif kind == "worked":
        learner.worked(Steps.between(StepTotals(), what))
    elif kind == "transfer":
        learner.transfer_took(what[0], what[1], asked=what[2])
    else:
        learner.way_took(what)


def values(known: EngineSpeed) -> dict[str, float]:
    return {name: getattr(known, name) for name in known.__struct_fields__}


@given(CLAIMS)
def test_every_coefficient_is_finite_and_none_is_negative(claims):
    family = Learner()
    learner = Learner(family)
    for kind, what in claims:
        claim(learner, kind, what)

        for known in (learner.coefficients(), family.coefficients(), Learner(family).coefficients()):
            assert all(math.isfinite(value) and value >= 0.0 for value in values(known).values())


@given(CLAIMS)
def test_the_same_claims_teach_the_same(claims):
    one, other = Learner(), Learner()
    for kind, what in claims:
        claim(one, kind, what)
        claim(other, kind, what)

    assert one.coefficients() == other.coefficients()


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
    learner = Learner()

    learner.worked(step)

    known = learner.coefficients()
    speeds = list(values(known).values())[:6]
    work = step.work()
    predicted = sum(speed * amount for speed, amount in zip(speeds, work, strict=True))
    assumed = sum(
        speed * amount for speed, amount in zip(list(values(Learner().coefficients()).values())[:6], work, strict=True)
    )
    before, after = abs(math.log(step.seconds / assumed)), abs(math.log(step.seconds / predicted))
    assert after <= max(0.3, 2 / 3 * before)
