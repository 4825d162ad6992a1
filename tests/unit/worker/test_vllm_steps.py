"""What vLLM's scheduler says of its steps, as load reports tell it. Needs no vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from services.worker.engines.vllm_steps import NoIterations, StepMeter


def step(took_s, *, prompts=0, decoding=0, usage=0.0, is_dummy=False):
    details = SimpleNamespace(
        elapsed_ms=took_s * 1000,
        num_ctx_tokens=prompts,
        num_generation_requests=decoding,
        is_dummy=is_dummy,
    )
    return SimpleNamespace(iteration_details=details, kv_cache_usage=usage)


def test_steps_are_added_up():
    meter = StepMeter()
    meter.tokens_per_use = 10_000
    meter.step(step(0.1, prompts=512), 1.1)
    meter.step(step(0.2, prompts=100, decoding=3, usage=0.05), 5.0)
    meter.step(step(0.05, decoding=4, usage=0.06), 9.0)

    totals = meter.totals()
    assert totals.seconds == pytest.approx(0.1 + 0.2 + 0.05)
    assert (totals.prefill_steps, totals.prefill_tokens) == (2, 612)
    assert (totals.decode_steps, totals.decode_requests) == (2, 7)
    assert totals.decode_context_tokens == 500 + 600


def test_what_lies_between_steps_without_a_pause_is_part_of_them():
    meter = StepMeter()
    for number in range(1, 11):
        meter.step(step(0.05, decoding=1), 1.0 + number * 0.06)

    assert meter.totals().seconds == pytest.approx(0.05 + 9 * 0.06)


def test_idle_time_is_no_part_of_a_step():
    meter = StepMeter()
    for number in range(1, 11):
        meter.step(step(0.05, decoding=1), number * 3.0)

    assert meter.totals().seconds == pytest.approx(10 * 0.05)


def test_a_prompts_pairs_count_with_the_step_of_its_first_token():
    meter = StepMeter()
    meter.step(step(0.1, prompts=2048), 1.0)
    meter.prompt_computed(3000, 1000)
    meter.step(step(0.1, prompts=952), 2.0)
    meter.step(step(0.1, decoding=1), 3.0)

    assert meter.totals().prefill_pairs == 3000 * (1000 + 1500)


def test_steps_that_compute_nothing_do_not_count():
    meter = StepMeter()
    meter.step(step(0.1, is_dummy=True), 1.0)
    meter.step(SimpleNamespace(iteration_details=None, kv_cache_usage=0.5), 2.0)

    assert meter.totals() is None


def test_vllm_keeps_its_details_to_itself_and_logs_the_rest():
    def record(text):
        return logging.LogRecord("vllm", logging.INFO, "", 0, text, None, None)

    assert not NoIterations().filter(record("%sIteration(%d): %d context requests"))
    assert NoIterations().filter(record("Avg prompt throughput: %.1f tokens/s"))
