"""How much work a measured load is, in workers' worth, and what the targets make of it."""

from __future__ import annotations

import dataclasses

import pytest

from services.orchestrator.planner.family import step_times
from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.work import Engines, ObservedDemand, Queues, Work, batch_max, work_of
from shared.contracts.load import EngineSpeed
from shared.contracts.planning import Demand
from shared.engine_speed.steps import DEFAULT_STEP_TIMES, Steps, StepTimeModel

RULES = Rules()
STEP_TIMES = StepTimeModel(prefill_token_s=1e-4, decode_step_s=0.01, decode_request_s=0.001)
"""10,000 prompt tokens a second; 40 completions at a time take 50 ms for a step."""
ENGINES = Engines(kv_tokens=1_000_000, requests_max=256, prefill=1, decode=1)
DEMAND = Demand(requests_per_s=1.0, prompt_tokens=2000, uncached_tokens=1000, completion_tokens=100, seconds=30)
BUSY_PREFILL = Steps(prefill_tokens=9000.0, decode_requests=80.0)
"""Of one second: 0.9 of a prefill worker, and 0.1 of a decode worker."""
NOTHING_WAITS = Queues()


def work(rate: Steps = BUSY_PREFILL, queues: Queues = NOTHING_WAITS, **observed: float) -> Work:
    return work_of(rate, queues, ObservedDemand(DEMAND, **observed), STEP_TIMES, ENGINES, RULES)


def test_what_engines_did_is_measured_in_workers():
    assert (work().prefill, work().decode) == (pytest.approx(0.9), pytest.approx(0.1))
    assert work().batch == pytest.approx(40.0)
    assert work().prompt_s == pytest.approx(0.1)


def test_what_engines_did_for_batches_is_no_work():
    shared = work(prefill_share=0.5, decode_share=0.25)

    assert (shared.prefill, shared.decode) == (pytest.approx(0.9 / 2), pytest.approx(0.1 / 4))
    assert (shared.batch, shared.prompt_s) == (pytest.approx(40.0), pytest.approx(0.1))


def test_what_waits_in_engines_is_work_of_its_own_phase():
    queued = work(queues=Queues(prompt_tokens=int(6e4 * RULES.clear_s), requests=int(4 * RULES.clear_s)))

    assert queued.prefill - work().prefill == pytest.approx(6.0)
    assert queued.decode - work().decode == pytest.approx(400 * 0.05 / 40)


def test_batches_beyond_the_target_fill_a_worker_and_what_is_too_much_is_a_queue():
    full, twice = work(queues=Queues(decoding=40)), work(queues=Queues(decoding=80))
    backlog = work(Steps(decode_requests=800.0), queues=Queues(decoding=40 + int(4 * RULES.clear_s)))

    assert (full.decode, full.decode_waiting) == (pytest.approx(1.0), 0.0)
    assert (twice.decode, twice.decode_waiting) == (pytest.approx(1.0), pytest.approx(40.0))
    assert backlog.decode == pytest.approx(1.0 + 0.5 * 400 * 0.05 / 40)
    assert work(queues=Queues(decoding=40), decode_share=0.25).decode == pytest.approx(0.25)


def test_the_causes_of_work_are_named():
    waits = work(queues=Queues(prompt_tokens=7, requests=3, decoding=80), waiting=12.0, rejected_per_s=0.5)

    routers = "12 requests wait in routers, 0.5/s are rejected"
    assert waits.prefill_cause == f"9000 prompt tokens/s, 7 tokens wait in engines, {routers}"
    assert waits.decode_cause == f"80 requests decode where 40 per worker may, 3 requests wait in engines, {routers}"


def test_waiting_requests_count_for_the_phase_that_is_full():
    for_prefill = work(waiting=RULES.clear_s)
    for_decode = work(Steps(prefill_tokens=1000.0, decode_requests=720.0), waiting=RULES.clear_s)
    for_both = work(Steps(prefill_tokens=9000.0, decode_requests=720.0), waiting=RULES.clear_s)

    assert for_prefill.prefill == pytest.approx(0.9 + 0.1)
    assert for_prefill.decode == pytest.approx(0.1)
    assert (for_decode.prefill, for_decode.decode) == (pytest.approx(0.1), pytest.approx(0.9 + 0.125))
    assert (for_both.prefill, for_both.decode) == (pytest.approx(1.0), pytest.approx(0.9 + 0.125))


def test_rejected_requests_count_for_both_phases():
    rejected = work(rejected_per_s=10.0)

    assert rejected.prefill == pytest.approx(0.9 + 1.0)
    assert rejected.decode == pytest.approx(0.1 + 1.25)


@pytest.mark.parametrize(
    ("itl_s", "context", "engines", "batch"),
    [
        (0.05, 0.0, ENGINES, 40.0),
        (0.03, 0.0, ENGINES, 20.0),
        (0.0, 0.0, ENGINES, 256.0),
        (0.05, 50_000.0, ENGINES, 20.0),
        (0.05, 0.0, Engines(kv_tokens=1, requests_max=8, prefill=1, decode=1), 8.0),
        (0.001, 0.0, ENGINES, 256.0),
        (0.05, 9e9, ENGINES, 1.0),
    ],
)
def test_a_batch_is_as_large_as_target_cache_and_engine_allow(
    itl_s: float, context: float, engines: Engines, batch: float
):
    assert batch_max(STEP_TIMES, context, engines, itl_s) == pytest.approx(batch)


def test_the_prefill_load_limit_follows_from_target_and_worker_count():
    loose = work()
    tight = dataclasses.replace(loose, prompt_s=0.5)

    assert loose.prefill_load_max(1) == pytest.approx(0.85)
    assert tight.prefill_load_max(1) == pytest.approx(0.5)
    assert tight.prefill_load_max(2) == pytest.approx(2 / 3)
    assert tight.prefill_load_max(100) == pytest.approx(0.85)


def test_a_target_that_no_engine_can_meet_does_not_empty_them():
    hopeless = dataclasses.replace(work(), prompt_s=3.0)
    hardly = dataclasses.replace(hopeless, prompt_s=1.99)

    assert hopeless.prefill_load_max(1) == 0.85
    assert hardly.prefill_load_max(1) == pytest.approx(0.3)


def speed_of(prefill_samples: float, decode_samples: float) -> EngineSpeed:
    """Prefill twice and decode three times as slow as the default."""
    times = [2 * one for one in DEFAULT_STEP_TIMES[:3]] + [3 * one for one in DEFAULT_STEP_TIMES[3:]]
    return EngineSpeed(
        **StepTimeModel(*times)._asdict(),
        prefill_samples=prefill_samples,
        decode_samples=decode_samples,
        batch_spread=0.1,
    )


@pytest.mark.parametrize(
    ("prefill_samples", "decode_samples", "factors"),
    [(9.0, 9.0, (2, 3)), (9.0, 0.0, (2, 2)), (0.0, 9.0, (3, 3)), (0.0, 0.0, (2, 3))],
)
def test_a_phase_never_measured_is_scaled_like_the_other(prefill_samples, decode_samples, factors):
    times = step_times(speed_of(prefill_samples, decode_samples))

    ratios = [one / default for one, default in zip(times, DEFAULT_STEP_TIMES, strict=True)]
    assert ratios == pytest.approx([factors[0]] * 3 + [factors[1]] * 3)
