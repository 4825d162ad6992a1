"""The step-time models: their limits, where their numbers are exact, and that no linear model is both of them."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from statistics import mean, pstdev

import numpy as np
import pytest

from services.worker.engines.simulated.core.settings import PROFILES, SimulatedProfile, StepTiming, read_profile
from services.worker.engines.simulated.core.step_models import (
    HOST_S,
    LAYERS,
    NOISE_STEPS,
    OTHER_KERNELS_US,
    noise_factor,
)
from services.worker.settings import Settings
from shared.runtime.settings import SettingsError, load


def timing(step_model: str = "linear", **settings: float) -> StepTiming:
    return replace(PROFILES["8b"], step_model=step_model, **settings)


@pytest.mark.parametrize("step_model", ["linear", "roofline", "table"])
def test_nothing_to_compute_takes_no_time(step_model):
    assert timing(step_model).step_s(0, 0.0, 0, 0) == 0.0


@pytest.mark.parametrize("step_model", ["linear", "roofline", "table"])
def test_more_context_never_takes_less_time(step_model):
    of = timing(step_model)
    for decoding in (1, 3, 40, 256, 300):
        times = [of.decode_s(decoding, decoding * each) for each in range(1, 120_000, 997)]
        assert times == sorted(times)
    prompts = [of.step_s(512, 512.0 * before, 0, 0) for before in range(256, 120_000, 997)]
    assert prompts == sorted(prompts)


def test_a_roofline_step_takes_the_longer_of_compute_and_memory():
    linear, roofline = timing(), timing("roofline")

    decode_s = roofline.decode_s(64, 64 * 2000)
    overhead_s = roofline.prefill_base_s
    assert roofline.step_s(32, 32 * 100.0, 64, 64 * 2000) == pytest.approx(decode_s + overhead_s, rel=0.01)
    assert linear.step_s(32, 32 * 100.0, 64, 64 * 2000) > linear.decode_s(64, 64 * 2000) + overhead_s + 0.001

    prompt_s = roofline.step_s(2048, 2048 * 1024.0, 0, 0)
    assert roofline.step_s(2048, 2048 * 1024.0, 1, 100) == pytest.approx(prompt_s, rel=0.01)
    assert roofline.decode_s(1, 100) == pytest.approx(linear.decode_s(1, 100), rel=0.01)


def test_the_table_returns_its_measurements():
    table = timing("table")

    def step_s(layer_us: float, tokens: int, vocabulary_us: float) -> float:
        return HOST_S + (LAYERS * (layer_us + OTHER_KERNELS_US * tokens) + vocabulary_us) * 1e-6

    assert table.decode_s(32, 32 * 1024) == pytest.approx(step_s(157.1 + 59.8, 32, 508.4))
    assert table.decode_s(1, 65_536) == pytest.approx(step_s(143.4 + 117.1, 1, 505.5))
    assert table.step_s(2048, 2048 * 1024.0, 0, 0) == pytest.approx(step_s(986.7 + 89.0, 2048, 505.5))
    halfway = (table.decode_s(64, 64 * 2048) + table.decode_s(64, 64 * 4096)) / 2
    assert table.decode_s(64, 64 * 3072) == pytest.approx(halfway)


@pytest.mark.parametrize(("step_model", "exact"), [("linear", True), ("roofline", False), ("table", False)])
def test_only_the_linear_model_is_what_a_learner_of_unit_costs_can_represent(step_model, exact):
    of, rng = timing(step_model), random.Random(1)
    rows, seconds = [], []
    for _ in range(400):
        tokens = rng.choice([0, rng.randint(1, 256), rng.randint(256, 2048)])
        pairs = tokens * rng.uniform(tokens / 2, 30_000)
        decoding = rng.choice([0, rng.randint(1, 200)]) if tokens else rng.randint(1, 200)
        context = decoding * rng.randint(100, 8_000)
        rows.append([tokens > 0, tokens, pairs, decoding > 0, decoding, context])
        seconds.append(of.step_s(tokens, pairs, decoding, context))
    taken = np.array(seconds)
    work = np.array(rows, dtype=float) / taken[:, None]  # relative errors count
    costs = np.linalg.lstsq(work, np.ones(len(taken)), rcond=None)[0]
    error = float(np.sqrt(np.mean((work @ costs - 1) ** 2)))

    assert error < 1e-9 if exact else error > 0.04


@pytest.mark.parametrize("step_model", ["linear", "roofline", "table"])
def test_half_the_speed_takes_twice_the_time(step_model):
    fast, slow = timing(step_model), timing(step_model, speed=0.5)

    for work in [(2048, 1e7, 0, 0), (0, 0.0, 17, 30_000), (100, 5000.0, 60, 90_000)]:
        assert slow.step_s(*work) == pytest.approx(2 * fast.step_s(*work))


def test_noise_keeps_the_mean_and_is_decided_by_its_seed():
    factors = [noise_factor(0.2, 7, NOISE_STEPS * index) for index in range(4000)]

    assert mean(factors) == pytest.approx(1.0, abs=0.01)
    assert pstdev([math.log(factor) for factor in factors]) == pytest.approx(0.2, abs=0.01)
    assert factors == [noise_factor(0.2, 7, NOISE_STEPS * index + NOISE_STEPS - 1) for index in range(4000)]
    assert len(set(factors) & {noise_factor(0.2, 8, NOISE_STEPS * index) for index in range(4000)}) < 40
    assert timing().noise_of(5) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9b", "there is no profile '9b'; there are default, instant, 8b, 70b"),
        ("8b,sped=2", "has no 'sped'; it has prefill_tokens_per_s, "),
        ("speed=0", "speed: Expected `float` > 0.0"),
        ("decode_base_s=-1", "decode_base_s: Expected `float` >= 0.0"),
        ("decode_base_s", "there is no profile 'decode_base_s'"),
        ("8b,decode_base_s", "decode_base_s: Expected `float`, got `str`"),
        ("transfer=pigeon", "transfer: Invalid enum value 'pigeon'"),
    ],
)
def test_a_wrong_profile_stops_the_worker_with_a_reason(text, message):
    with pytest.raises(SettingsError, match=f"WORKER_\\*: WORKER_SIMULATED: .*{re.escape(message)}"):
        load(Settings, "WORKER_", {"WORKER_SIMULATED": text})


def test_values_of_a_profile_can_be_changed_one_by_one():
    assert read_profile("") == read_profile("default") == SimulatedProfile()
    assert read_profile("8b, speed=0.5, transfer=nixl") == replace(PROFILES["8b"], speed=0.5, transfer="nixl")
    assert read_profile("speed=2,speed=3,decode_base_s=0").speed == 3.0
