"""The steps between two totals, and when they make a sample."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.load import EngineSpeed, StepTotals
from shared.engine_speed.steps import NO_STEPS, PendingSteps, Steps, StepTimeModel

ADDED = st.tuples(*[st.integers(0, 10**6)] * 7).map(lambda counts: Steps(*counts))


def totals_of(steps: Steps) -> StepTotals:
    return StepTotals(**msgspec.structs.asdict(steps))


def decoded(seconds: float) -> StepTotals:
    return StepTotals(seconds=seconds, decode_steps=round(250 * seconds), decode_requests=round(250 * seconds))


def test_steps_totals_and_model_have_the_same_fields():
    assert Steps.__struct_fields__ == StepTotals.__struct_fields__
    assert len(StepTimeModel._fields) == len(NO_STEPS.work())
    assert EngineSpeed.__struct_fields__[:6] == StepTimeModel._fields


def test_steps_are_the_difference_of_two_totals():
    earlier = StepTotals(seconds=1.0, prefill_steps=1, prefill_tokens=10, decode_steps=2, decode_requests=4)
    later = StepTotals(seconds=3.0, prefill_steps=2, prefill_tokens=30, decode_steps=5, decode_requests=9)

    done = Steps.between(earlier, later)

    assert (done.seconds, done.work()) == (2.0, (1, 20, 0, 3, 5, 0))
    assert done.per(2.0) == Steps(1.0, 0.5, 10.0, 0.0, 1.5, 2.5, 0.0)


@given(st.lists(ADDED, max_size=20), st.floats(0.0, 10.0))
def test_each_step_is_in_one_sample_and_none_is_lost(added: list[Steps], seconds_min: float):
    pending, totals, learned = PendingSteps(), NO_STEPS, NO_STEPS
    for steps in added:
        totals += steps
        sample = pending.sample(totals_of(totals), seconds_min)
        assert sample is None or sample.seconds >= seconds_min
        learned += sample or NO_STEPS

    rest = pending.sample(totals_of(totals), 0.0)
    assert rest is not None
    assert learned + rest == totals


def test_short_steps_go_into_the_next_sample():
    pending = PendingSteps()

    samples = [pending.sample(decoded(0.004 * count), 0.02) for count in range(1, 7)]

    assert [sample is not None for sample in samples] == [False, False, False, False, True, False]
    assert samples[4] == Steps.between(StepTotals(), decoded(0.02))


def test_totals_that_start_over_are_no_sample():
    pending = PendingSteps()
    pending.sample(decoded(100.0), 0.02)

    assert pending.sample(decoded(1.0), 0.02) is None
    assert pending.sample(decoded(3.0), 0.02) == Steps.between(decoded(1.0), decoded(3.0))


@pytest.mark.parametrize("nonsense", [{"seconds": math.nan}, {"seconds": math.inf}, {"prefill_pairs": math.nan}])
def test_totals_that_are_no_numbers_are_ignored(nonsense: dict[str, float]):
    pending = PendingSteps()

    assert pending.sample(msgspec.structs.replace(decoded(1.0), **nonsense), 0.02) is None
    assert pending.sample(decoded(2.0), 0.02) == Steps.between(StepTotals(), decoded(2.0))


def test_steps_with_negative_or_nan_fields_are_impossible():
    assert NO_STEPS.is_possible
    assert not Steps(seconds=1.0, decode_steps=-1).is_possible
    assert not Steps(seconds=1.0, prefill_pairs=math.nan).is_possible
