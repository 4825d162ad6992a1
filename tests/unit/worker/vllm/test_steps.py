"""Step totals from vLLM's scheduler statistics; needs no vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from services.worker.engines.vllm.steps import NoIterations, StepMeter
from shared.engine_speed.learner import SpeedLearner
from shared.engine_speed.steps import StepTimeModel


def step(meter: StepMeter, now: float, *, prompts=0, decoding=0, checked=0, left=1, usage=0.0, is_dummy=False) -> None:
    """One that is over; ``left`` requests still run after it. ``checked``: tokens that it computed for those that decode,
    with drafted ones.
    """
    details = SimpleNamespace(
        num_ctx_requests=int(prompts > 0),
        num_ctx_tokens=prompts,
        num_generation_requests=decoding,
        num_generation_tokens=checked or decoding,
        is_dummy=is_dummy,
    )
    meter.step(SimpleNamespace(iteration_details=details, kv_cache_usage=usage, num_running_reqs=left), now)


def answered(tokens: int = 1) -> SimpleNamespace:
    """A step's output for a request that decodes."""
    return SimpleNamespace(prefill_stats=None, events=None, new_token_ids=[7] * tokens)


def first_token(meter: StepMeter, made_at: float, scheduled_at: float, *, computed=100, cached=0) -> None:
    """It came out of the step that ended then."""
    stats = SimpleNamespace(num_computed_tokens=computed, num_local_cached_tokens=cached, num_external_cached_tokens=0)
    events = [
        SimpleNamespace(type=SimpleNamespace(name=name), timestamp=at)
        for name, at in (("QUEUED", scheduled_at - 1.0), ("SCHEDULED", scheduled_at))
    ]
    meter.results([SimpleNamespace(prefill_stats=stats, events=events)], made_at)


def test_the_first_step_after_idling_begins_when_a_request_was_scheduled():
    meter = StepMeter()
    first_token(meter, 10.25, 10.0)
    step(meter, 10.3, prompts=100, left=0)
    first_token(meter, 20.5, 20.0)
    step(meter, 20.6, prompts=200, left=0)

    assert meter.totals().seconds == pytest.approx(0.25 + 0.5)
    assert (meter.totals().prefill_steps, meter.totals().prefill_tokens) == (2, 300)


def test_consecutive_steps_have_no_pause_between_them():
    meter = StepMeter()
    meter.tokens_per_use = 10_000
    first_token(meter, 1.2, 1.0)
    step(meter, 1.2, prompts=100)
    for number in range(1, 11):
        meter.results([answered()], 1.2 + number * 0.06)
        step(meter, 1.21 + number * 0.06, decoding=2, usage=0.05, left=2)

    totals = meter.totals()
    assert totals.seconds == pytest.approx(0.2 + 10 * 0.06)
    assert (totals.decode_steps, totals.decode_requests, totals.decode_context_tokens) == (10, 20, 5000)


@pytest.mark.parametrize("accepted", [0, 3])
def test_accepted_drafts_do_not_make_a_step_look_faster(accepted: int):
    meter, learner = StepMeter(), SpeedLearner()
    first_token(meter, 1.2, 1.0)
    step(meter, 1.2, prompts=100, left=2)
    for number in range(1, 101):
        meter.results([answered(1 + accepted), answered(1 + accepted)], 1.2 + number * 0.06)
        step(meter, 1.21 + number * 0.06, decoding=2, checked=2 * (1 + 3), left=2)
        learner.observe(meter.totals(), meter.counter.prompt_totals())

    totals = meter.totals()
    assert totals.seconds == pytest.approx(0.2 + 100 * 0.06)
    assert (totals.decode_steps, totals.decode_requests) == (100, 200)
    assert StepTimeModel.of(learner.speed).decode_step_of(2, 0) == pytest.approx(0.06, rel=0.05)


def test_steps_within_a_prompt_end_when_they_are_reported():
    meter = StepMeter()
    first_token(meter, 1.2, 1.0)
    step(meter, 1.2, prompts=100)
    step(meter, 1.5, prompts=2048)
    step(meter, 1.8, prompts=2048)
    first_token(meter, 1.9, 1.2, computed=5000)
    step(meter, 1.95, prompts=904)

    totals = meter.totals()
    assert totals.seconds == pytest.approx(0.9)
    assert totals.prefill_tokens == 100 + 5000


def test_a_step_with_an_unknown_start_does_not_count():
    meter = StepMeter()
    step(meter, 1.5, prompts=2048)
    assert meter.totals() is None

    first_token(meter, 1.9, 1.2, computed=3000)
    step(meter, 1.95, prompts=952)
    assert meter.totals().seconds == pytest.approx(0.4)
    assert meter.totals().prefill_tokens == 952


def test_idle_time_is_no_part_of_a_step():
    meter = StepMeter()
    for at in (10.0, 50.0, 90.0):
        first_token(meter, at + 0.1, at)
        step(meter, at + 0.1, prompts=100)
        meter.results([answered()], at + 0.15)
        step(meter, at + 0.15, decoding=1, left=0)

    assert meter.totals().seconds == pytest.approx(3 * 0.15)


def test_a_prompts_pairs_count_with_the_step_of_its_first_token():
    meter = StepMeter()
    first_token(meter, 1.2, 1.0, computed=3000, cached=1000)
    step(meter, 1.2, prompts=3000)
    meter.results([answered()], 1.3)
    step(meter, 1.3, decoding=1)

    assert meter.totals().prefill_pairs == 3000 * (1000 + 1500)


def test_a_prompt_whose_answer_began_before_its_step_counts_with_the_step():
    meter, expected = StepMeter(), StepMeter()
    stats = SimpleNamespace(num_computed_tokens=20, num_local_cached_tokens=0, num_external_cached_tokens=480)
    scheduled = SimpleNamespace(type=SimpleNamespace(name="SCHEDULED"), timestamp=10.0)

    meter.begun(SimpleNamespace(request_id="r", prefill_stats=stats, events=[]))
    meter.results([SimpleNamespace(request_id="r", prefill_stats=None, events=[scheduled])], 10.2)
    expected.results([SimpleNamespace(request_id="r", prefill_stats=stats, events=[scheduled])], 10.2)
    for one in (meter, expected):
        step(one, 10.2, prompts=21)

    assert meter.totals() == expected.totals()
    assert meter.totals().prefill_pairs == 20 * (480 + 10)


def test_empty_steps_do_not_count():
    meter = StepMeter()
    step(meter, 1.0, is_dummy=True)
    meter.step(SimpleNamespace(iteration_details=None, kv_cache_usage=0.5, num_running_reqs=1), 2.0)

    assert meter.totals() is None


def test_iteration_details_are_filtered_from_vllms_log():
    def record(text):
        return logging.LogRecord("vllm", logging.INFO, "", 0, text, None, None)

    assert not NoIterations().filter(record("%sIteration(%d): %d context requests"))
    assert NoIterations().filter(record("Avg prompt throughput: %.1f tokens/s"))
