"""The clairvoyant bound: nothing that runs in the replay serves more, and it is not far above what can be served."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import BATON_WAITING, ORACLE
from bench.policies.base import Baseline
from bench.study.bound import Bound, charges_of, upper_bound
from bench.study.experiment import Setting, run
from bench.study.results import Slo, summarise
from bench.study.workloads import NAMES, generate
from replay.profile import PROFILES
from replay.split import Split
from replay.traces import Request, at_load
from services.router.placement.placement import Rejection
from services.worker.engines.simulated.core.step_models import StepModelName
from shared.contracts.failures import Reason
from tests.support.examples import SEEDS, examples, seeded
from tests.support.replay_worlds import PROFILE, context, conversations, world

TIGHT = Slo(ttft_s=0.3, itl_s=0.025)
SPLITS = (Split(both=1), Split(both=2), Split(prefill=1, decode=1))
POLICIES = (BATON_WAITING, ORACLE, "least-loaded", "mooncake-rejecting", "llm-d")


class Scripted(Baseline):
    """Sends each request where a script says; None: rejects it."""

    def __init__(self, of, script) -> None:
        super().__init__(context(of))
        self._script = iter(script)

    def choose(self, request, workers, matches):
        where = next(self._script)
        return workers[where] if where is not None else Rejection(reason=Reason.OVERLOADED, message="")


def bound_of(requests: list[Request], split: Split, slo: Slo = TIGHT) -> Bound:
    return upper_bound(requests, split, PROFILE, slo)


def sum_of(outcomes, slo):
    result = summarise(("", 1.0, ""), outcomes, [], slo, 0.0)
    return result.good_share * result.requests, result


@pytest.mark.parametrize("step_model", get_args(StepModelName))
@given(
    tokens=st.integers(0, 2048),
    behind=st.integers(0, 100_000),
    decoding=st.integers(0, 256),
    context=st.floats(0, 1),
    own=st.floats(0, 1),
)
@settings(max_examples=examples(200))
def test_a_step_is_charged_for_no_more_than_it_takes(step_model, tokens, behind, decoding, context, own):
    profile = replace(PROFILES["8b"], step_model=step_model)
    pairs = tokens * (behind + tokens / 2)
    decoding = min(decoding, 2048 - tokens)
    # Several sequences may share what the cache holds.
    in_sum = decoding * (1 + int(context * profile.kv_blocks * profile.block_tokens))
    resident = min(in_sum, own * profile.kv_blocks * profile.block_tokens)

    for charges in charges_of(profile):
        charged = (
            charges.token_s * tokens
            + charges.pair_s * pairs
            + charges.sequence_s * decoding
            + charges.context_s * in_sum
            + charges.resident_s * resident
        )
        assert charged <= profile.step_s(tokens, pairs, decoding, in_sum) * (1 + 1e-9)


@pytest.mark.parametrize("step_model", get_args(StepModelName))
def test_an_idle_engine_is_charged_for_much_of_a_prompt_by_every_step_model(step_model):
    profile = replace(PROFILES["8b"], step_model=step_model)
    charged = max(charges.token_s * 12_000 + charges.pair_s * 12_000**2 / 2 for charges in charges_of(profile))

    assert 0.7 * profile.prompt_s(12_000, 0) < charged <= profile.prompt_s(12_000, 0)


@pytest.mark.parametrize("step_model", [step_model for step_model in get_args(StepModelName) if step_model != "linear"])
@seeded(2)
@given(seed=SEEDS)
def test_with_other_step_models_noise_and_a_slow_worker_no_policy_exceeds_the_bound(step_model, seed):
    profile = replace(PROFILES["8b"], step_model=step_model, noise=0.1, host_blocks=100)
    requests = conversations(40, seed=seed, per_s=60.0)
    setting = Setting(
        requests=requests, split=Split(both=2), profile=profile, slo=TIGHT, seed=seed % 1000, slow={1: 0.6}
    )
    bound = upper_bound(requests, setting.split, profile, TIGHT, slow=setting.slow)

    assert run(setting, "mooncake", 1.0).goodput_per_s <= bound.requests_per_s * (1 + 1e-9)


@seeded(6)
@given(seed=SEEDS)
def test_no_policy_serves_more_than_the_bound(seed):
    rng = random.Random(seed)
    split = rng.choice(SPLITS)
    requests = conversations(50, seed=seed, per_s=rng.choice((8.0, 30.0, 100.0)))
    bound = bound_of(requests, split)
    setting = Setting(requests=requests, split=split, profile=PROFILE, slo=TIGHT, seed=seed)

    for policy in rng.sample(POLICIES, 2):
        result = run(setting, policy, 1.0)
        assert result.goodput_per_s <= bound.requests_per_s * (1 + 1e-9)
        assert result.goodput_tokens_per_s <= bound.tokens_per_s * (1 + 1e-9)


@seeded(3)
@given(seed=SEEDS)
def test_in_a_closed_loop_no_policy_serves_at_a_higher_rate_than_the_bound(seed):
    rng = random.Random(seed)
    requests = at_load(generate(rng.choice(NAMES), 40, seed=seed), 20.0)
    setting = Setting(requests=requests, split=Split(both=2), profile=PROFILES["8b"], slo=Slo(), seed=seed)
    bound = upper_bound(requests, setting.split, setting.profile, setting.slo)
    result = run(setting, rng.choice(POLICIES), 1.0)

    assert result.goodput_per_s <= bound.requests_per_s * (1 + 1e-9)
    assert result.goodput_tokens_per_s <= bound.tokens_per_s * (1 + 1e-9)


@seeded(3)
@given(seed=SEEDS)
def test_no_choice_of_workers_and_rejections_serves_more_than_the_bound(seed):
    requests = conversations(5, seed=seed, per_s=60.0)
    bound = bound_of(requests, Split(both=2), Slo(ttft_s=0.2, itl_s=0.02))
    best = best_tokens = 0.0
    for script in itertools.product((None, 0, 1), repeat=len(requests)):
        of = world(Split(both=2))
        of.fleet.placer = Scripted(of, script)
        good, result = sum_of(of.run(requests), Slo(ttft_s=0.2, itl_s=0.02))
        best, best_tokens = max(best, good), max(best_tokens, result.goodput_tokens_per_s)

    assert best <= bound.requests * (1 + 1e-9)
    assert best_tokens <= bound.tokens_per_s * (1 + 1e-9)


def test_of_prompts_that_come_together_as_many_are_good_as_fit_into_the_target():
    each_s = PROFILE.prompt_s(1400, 0)
    requests = [Request(0.0, (), 1400, 1) for _ in range(10)]

    fits = bound_of(requests, Split(both=1), Slo(ttft_s=3.5 * each_s)).requests

    assert 3.0 <= fits <= 3.6


def test_a_prefix_that_all_share_is_paid_for_once():
    alone = [Request(0.0, tuple(range(100 * number, 100 * number + 4)), 2100, 1) for number in range(8)]
    alike = [Request(0.0, (1, 2, 3, 4), 2100, 1) for _ in range(8)]
    slo = Slo(ttft_s=2 * PROFILE.prompt_s(2100, 0))

    assert bound_of(alone, Split(both=1), slo).requests == pytest.approx(2.0, rel=0.05)
    assert bound_of(alike, Split(both=1), slo).requests == pytest.approx(8.0)


def test_a_prompt_that_no_engine_computes_in_time_is_in_no_bound():
    requests = [Request(0.0, (), 20_000, 2), Request(1.0, (), 100, 2)]

    assert bound_of(requests, Split(both=4)).requests == pytest.approx(1.0)


def test_decode_workers_bound_what_prefill_workers_begin():
    requests = [Request(number / 100, (), 20, 400) for number in range(200)]
    slo = Slo(ttft_s=1.0, itl_s=0.01)

    few, many = (bound_of(requests, split, slo).requests for split in (Split(prefill=3, decode=1), Split(both=4)))

    assert few < 0.5 * many
    assert many < len(requests)


def test_at_light_load_the_bound_is_near_what_policies_serve():
    requests = [replace(request, blocks=(), output_tokens=2) for request in conversations(300, per_s=3.0)]
    slo = Slo(ttft_s=1.0, itl_s=0.1)
    setting = Setting(requests=requests, split=Split(both=2), profile=PROFILE, slo=slo, seed=1)
    best = max(run(setting, policy, 1.0).goodput_per_s for policy in (BATON_WAITING, "mooncake-rejecting"))

    assert best <= bound_of(requests, Split(both=2), slo).requests_per_s < 1.3 * best
