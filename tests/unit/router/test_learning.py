"""What a worker's speeds are taken for, from what it has measured."""

from __future__ import annotations

import random
from statistics import median

import msgspec
import pytest

from services.router.state.engine_speed import EngineSpeed
from services.router.state.speed_learner import GROWN_SAMPLE_S, Learner
from services.router.state.unit_costs import Typical
from shared.contracts.load import StepTotals
from shared.engine_speed import Steps


def prefill(computed_tokens: int, cached_tokens: int, seconds: float) -> Steps:
    """A prompt that was computed in one step that did nothing else."""
    pairs = computed_tokens * (cached_tokens + computed_tokens / 2)
    return Steps(seconds=seconds, prefill_steps=1, prefill_tokens=computed_tokens, prefill_pairs=pairs)


def decode(running: int, context_tokens: int, seconds: float) -> Steps:
    """A step that did nothing but decode."""
    return Steps(seconds=seconds, decode_steps=1, decode_requests=running, decode_context_tokens=context_tokens)


SIMULATED = EngineSpeed(
    prefill_base_s=0.002,
    prefill_s_per_token=1 / 8000,
    prefill_s_per_pair=0.0,
    decode_base_s=0.004,
    decode_s_per_request=0.0001,
    decode_s_per_context_token=0.0,
    transfer_base_s=0.002,
    transfer_s_per_token=2e-6,
)
BIG_GPU = EngineSpeed(
    prefill_base_s=0.004,
    prefill_s_per_token=1 / 20_000,
    prefill_s_per_pair=1 / 20_000 / 20_000,
    decode_base_s=0.006,
    decode_s_per_request=5e-5,
    decode_s_per_context_token=3e-8,
    transfer_base_s=0.001,
    transfer_s_per_token=1e-6,
)
SMALL_CPU = EngineSpeed(
    prefill_base_s=0.05,
    prefill_s_per_token=1 / 200,
    prefill_s_per_pair=1 / 200 / 4000,
    decode_base_s=0.1,
    decode_s_per_request=0.01,
    decode_s_per_context_token=1e-6,
    transfer_base_s=0.02,
    transfer_s_per_token=1e-4,
)
ENGINES = pytest.mark.parametrize("true", [SIMULATED, BIG_GPU, SMALL_CPU], ids=["simulated", "gpu", "cpu"])


def seconds_of(speeds: EngineSpeed, done: Steps) -> float:
    return (
        speeds.prefill_base_s * done.prefill_steps
        + speeds.prefill_s_per_token * done.prefill_tokens
        + speeds.prefill_s_per_pair * done.prefill_pairs
        + speeds.decode_base_s * done.decode_steps
        + speeds.decode_s_per_request * done.decode_requests
        + speeds.decode_s_per_context_token * done.decode_context_tokens
    )


def transfer_s_of(speeds: EngineSpeed, tokens: int) -> float:
    return speeds.transfer_base_s + speeds.transfer_s_per_token * tokens


def some_steps(draw: random.Random, kind: str = "") -> Steps:
    """What an engine may have done between two reports: prompts, decoding, or both."""
    kind = kind or draw.choice(["prompts", "decoding", "both"])
    tokens = steps = batch = 0
    pairs = context = 0.0
    if kind != "decoding":
        tokens = round(30 * 500 ** draw.random())
        pairs = tokens * (draw.choice([0, 0, draw.randrange(8000)]) + tokens / 2)
    if kind != "prompts":
        steps, batch = draw.randrange(1, 40), draw.randrange(1, 60)
        context = steps * batch * draw.randrange(100, 4000)
    return Steps(
        prefill_steps=-(-tokens // 2048),
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        decode_steps=steps,
        decode_requests=steps * batch,
        decode_context_tokens=round(context),
    )


def measured(draw: random.Random, seconds: float, *, noise: float = 0.25, outliers: float = 0.1) -> float:
    """As a worker on a machine that others use as well would measure it."""
    seconds *= draw.lognormvariate(0.0, noise)
    return seconds * draw.uniform(10, 100) if draw.random() < outliers else seconds


def teach(learner: Learner, true: EngineSpeed, draw: random.Random, samples: int, **trouble: float) -> None:
    for _ in range(samples):
        done = some_steps(draw)
        took_s = measured(draw, seconds_of(true, done), **trouble)
        learner.worked(msgspec.structs.replace(done, seconds=took_s))


def errors(learner: Learner, true: EngineSpeed, kind: str = "") -> list[float]:
    """Relative, of predictions for what was not seen."""
    draw, known = random.Random(99), learner.coefficients()
    asked = [some_steps(draw, kind) for _ in range(200)]
    return [abs(seconds_of(known, done) / seconds_of(true, done) - 1) for done in asked]


@ENGINES
def test_what_is_measured_without_trouble_is_predicted_almost_exactly(true):
    learner = Learner()
    teach(learner, true, random.Random(1), 60, noise=0.01, outliers=0.0)

    for kind in ("prompts", "decoding", "both"):
        assert median(errors(learner, true, kind)) < 0.03
        assert max(errors(learner, true, kind)) < 0.5


@ENGINES
@pytest.mark.parametrize("seed", range(8))
def test_a_few_dozen_samples_are_enough_though_they_scatter_and_one_in_ten_is_absurd(true, seed):
    learner = Learner()
    teach(learner, true, random.Random(seed), 60)

    assert median(errors(learner, true)) < 0.3

    teach(learner, true, random.Random(seed + 1000), 140)

    assert median(errors(learner, true)) < 0.15


def test_the_mean_of_such_samples_would_not_do():
    """What shows that the test above can fail."""
    draw = random.Random(0)
    ratios = [measured(draw, 1.0) for _ in range(200)]

    assert sum(ratios) / len(ratios) > 3.0


@ENGINES
@pytest.mark.parametrize("seed", range(4))
def test_a_first_sample_that_is_absurd_is_got_over(true, seed):
    learner = Learner()
    first = some_steps(random.Random(seed), "both")
    learner.worked(msgspec.structs.replace(first, seconds=80 * seconds_of(true, first)))
    teach(learner, true, random.Random(seed), 60)

    assert median(errors(learner, true)) < 0.5


@ENGINES
@pytest.mark.parametrize("factor", [0.5, 2.0, 5.0])
def test_a_worker_whose_speed_changes_is_followed_within_a_hundred_samples(true, factor):
    learner, draw = Learner(), random.Random(3)
    teach(learner, true, draw, 300)
    slower = EngineSpeed(**{name: factor * getattr(true, name) for name in true.__struct_fields__})
    assert median(errors(learner, slower)) > 0.4

    teach(learner, slower, draw, 100)

    assert median(errors(learner, slower)) < 0.3


def test_before_the_first_sample_the_assumptions_hold():
    known, assumed = Learner().coefficients(), EngineSpeed()

    assert known.prefill_s_per_token == pytest.approx(assumed.prefill_s_per_token)
    assert known.decode_base_s == pytest.approx(assumed.decode_base_s)
    assert known.transfer_s_per_token == pytest.approx(assumed.transfer_s_per_token)


def test_one_prompt_scales_everything_about_prompts_and_nothing_about_decoding():
    learner, before = Learner(), Learner().coefficients()
    expected_s = before.prefill_base_s + 1000 * before.prefill_s_per_token + 500_000 * before.prefill_s_per_pair

    learner.worked(prefill(1000, 0, 10 * expected_s))

    known = learner.coefficients()
    assert 1000 * known.prefill_s_per_token == pytest.approx(10 * 1000 * before.prefill_s_per_token, rel=0.3)
    assert known.prefill_base_s > 4 * before.prefill_base_s
    assert known.prefill_s_per_pair > 4 * before.prefill_s_per_pair
    assert known.decode_base_s == pytest.approx(before.decode_base_s)


def test_one_decode_step_scales_everything_about_decoding():
    learner, before = Learner(), Learner().coefficients()

    learner.worked(decode(1, 100, 0.1 * before.decode_base_s))

    known = learner.coefficients()
    assert known.decode_base_s == pytest.approx(0.1 * before.decode_base_s, rel=0.3)
    assert known.decode_s_per_request < 0.3 * before.decode_s_per_request
    assert known.prefill_s_per_token == pytest.approx(before.prefill_s_per_token)


@pytest.mark.parametrize("seed", range(4))
def test_the_time_to_fetch_kv_is_learned_from_reads(seed):
    learner, draw = Learner(), random.Random(seed)
    for _ in range(200):
        tokens = round(32 * 500 ** draw.random())
        learner.transfer_took(tokens, measured(draw, transfer_s_of(SMALL_CPU, tokens)))

    known = learner.coefficients()
    wrong = [abs(transfer_s_of(known, n) / transfer_s_of(SMALL_CPU, n) - 1) for n in (64, 512, 4096)]
    assert max(wrong) < 0.35


def test_a_new_worker_is_taken_for_its_like_until_it_has_measured_itself():
    family = Learner()
    teach(Learner(family), BIG_GPU, random.Random(1), 100, outliers=0.0)

    assert median(errors(Learner(family), BIG_GPU)) < 0.15


def test_what_is_learned_of_one_worker_later_reaches_those_that_have_measured_nothing():
    family = Learner()
    idle, busy = Learner(family), Learner(family)
    teach(busy, BIG_GPU, random.Random(1), 100, outliers=0.0)

    assert median(errors(idle, BIG_GPU)) < 0.15


def test_a_slower_machine_among_its_like_is_found_out_and_leaves_the_others_alone():
    family = Learner()
    fast, slow = Learner(family), Learner(family)
    half = EngineSpeed(**{name: 2 * getattr(BIG_GPU, name) for name in BIG_GPU.__struct_fields__})
    teach(fast, BIG_GPU, random.Random(1), 100, outliers=0.0)

    teach(slow, half, random.Random(2), 30, outliers=0.0)

    assert median(errors(slow, half)) < 0.2
    assert median(errors(fast, BIG_GPU)) < 0.15


def totals_after(*steps: Steps | StepTotals) -> StepTotals:
    return StepTotals(**{name: sum(getattr(one, name) for one in steps) for name in StepTotals.__struct_fields__})


def test_the_first_report_of_a_worker_covers_its_whole_life():
    done = some_steps(random.Random(1), "both")
    learner = Learner()

    assert learner.told(totals_after(msgspec.structs.replace(done, seconds=seconds_of(BIG_GPU, done))))
    assert learner.steps.is_own


def test_reports_of_an_idle_worker_teach_nothing():
    done = some_steps(random.Random(1), "both")
    told = totals_after(msgspec.structs.replace(done, seconds=1.0))
    learner = Learner()
    learner.told(told)
    known = learner.coefficients()

    assert not learner.told(told)
    assert learner.coefficients() == known


def test_a_worker_that_is_known_is_learned_from_less_often():
    step = StepTotals(seconds=0.1, decode_steps=20, decode_requests=200, decode_context_tokens=20_000)
    learner, told = Learner(), StepTotals()
    taught = 0
    for _ in range(1000):
        told = totals_after(told, step)
        taught += learner.told(told)

    assert 50 < taught < 60 + 1000 * step.seconds / GROWN_SAMPLE_S


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e30])
def test_nonsense_changes_nothing(seconds):
    learner = Learner()
    learner.worked(prefill(1000, 0, 0.1))
    known = learner.coefficients()

    assert not learner.worked(prefill(1000, 0, seconds))
    assert not learner.worked(decode(5, 1000, seconds))
    assert not learner.transfer_took(1000, seconds)
    assert not learner.told(StepTotals(seconds=seconds, prefill_steps=1, prefill_tokens=1))
    assert not learner.worked(prefill(-5, 0, 0.1))
    assert learner.coefficients() == known


def test_how_much_prompts_attend_to_is_known_for_those_that_wait():
    learner = Learner()
    for _ in range(50):
        learner.worked(prefill(1000, 3000, 0.2))

    assert learner.coefficients().pairs_per_token == pytest.approx(3500.0)


def test_the_typical_duration_is_the_median_and_not_moved_by_the_absurd():
    draw, typical = random.Random(5), Typical(1.0)
    for _ in range(400):
        typical.learn(measured(draw, 0.02))

    assert 0.016 < typical.seconds < 0.028


def test_the_first_duration_is_believed_at_once_as_far_as_it_is_near():
    typical = Typical(0.002)
    typical.learn(0.003)

    assert typical.seconds == 0.003
