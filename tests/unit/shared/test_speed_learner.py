"""An engine's speed is learned from its step totals, and combined for engines that are alike."""

from __future__ import annotations

import random
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.load import EngineSpeed, StepTotals
from shared.engine_speed.learner import LATER_SAMPLE_S, SpeedLearner, combined, filled_in, is_measured, is_valid
from shared.engine_speed.steps import DEFAULT_STEP_TIMES, NO_STEPS, Steps, StepTimeModel, StepTotalsCounter
from tests.support.examples import examples


def prefill(computed_tokens: int, cached_tokens: int, seconds: float) -> Steps:
    """A prompt computed in one step of its own."""
    pairs = computed_tokens * (cached_tokens + computed_tokens / 2)
    return Steps(seconds=seconds, prefill_steps=1, prefill_tokens=computed_tokens, prefill_pairs=pairs)


def decode(running: int, context_tokens: int, seconds: float) -> Steps:
    """A step that only decodes."""
    return Steps(seconds=seconds, decode_steps=1, decode_requests=running, decode_context_tokens=context_tokens)


SIMULATED = StepTimeModel(prefill_step_s=0.002, prefill_token_s=1 / 8000, decode_step_s=0.004, decode_request_s=0.0001)
BIG_GPU = StepTimeModel(
    prefill_step_s=0.004,
    prefill_token_s=1 / 20_000,
    prefill_pair_s=1 / 20_000 / 20_000,
    decode_step_s=0.006,
    decode_request_s=5e-5,
    decode_context_token_s=3e-8,
)
SMALL_CPU = StepTimeModel(
    prefill_step_s=0.05,
    prefill_token_s=1 / 200,
    prefill_pair_s=1 / 200 / 4000,
    decode_step_s=0.1,
    decode_request_s=0.01,
    decode_context_token_s=1e-6,
)
ENGINES = pytest.mark.parametrize("true", [SIMULATED, BIG_GPU, SMALL_CPU], ids=["simulated", "gpu", "cpu"])


def seconds_of(times: StepTimeModel, done: Steps) -> float:
    return sum(time * amount for time, amount in zip(times, done.work(), strict=True))


def times_of(learner: SpeedLearner) -> StepTimeModel:
    return StepTimeModel.of(learner.speed) if learner.speed is not None else DEFAULT_STEP_TIMES


def some_steps(draw: random.Random, kind: str = "") -> Steps:
    """Work between two reports: prompts, decoding, or both."""
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
    """As measured on a machine with other load."""
    seconds *= draw.lognormvariate(0.0, noise)
    return seconds * draw.uniform(10, 100) if draw.random() < outliers else seconds


def teach(learner: SpeedLearner, true: StepTimeModel, draw: random.Random, samples: int, **trouble: float) -> None:
    for _ in range(samples):
        done = some_steps(draw)
        took_s = measured(draw, seconds_of(true, done), **trouble)
        learner.learn(msgspec.structs.replace(done, seconds=took_s))


def taught(true: StepTimeModel, samples: int, seed: int = 1) -> SpeedLearner:
    learner = SpeedLearner()
    teach(learner, true, random.Random(seed), samples, outliers=0.0)
    return learner


def errors(known: SpeedLearner | EngineSpeed | None, true: StepTimeModel, kind: str = "") -> list[float]:
    """Relative, of predictions for other steps than those learned from."""
    assert known is not None
    times = times_of(known) if isinstance(known, SpeedLearner) else StepTimeModel.of(known)
    draw = random.Random(99)
    asked = [some_steps(draw, kind) for _ in range(200)]
    return [abs(seconds_of(times, done) / seconds_of(true, done) - 1) for done in asked]


@ENGINES
def test_clean_samples_give_almost_exact_predictions(true):
    learner = SpeedLearner()
    teach(learner, true, random.Random(1), 100, noise=0.01, outliers=0.0)

    for kind in ("prompts", "decoding", "both"):
        assert median(errors(learner, true, kind)) < 0.03
        assert max(errors(learner, true, kind)) < 0.5


@ENGINES
@pytest.mark.parametrize("seed", range(8))
def test_noisy_samples_with_outliers_suffice_in_dozens(true, seed):
    learner = SpeedLearner()
    teach(learner, true, random.Random(seed), 60)

    assert median(errors(learner, true)) < 0.3

    teach(learner, true, random.Random(seed + 1000), 140)

    assert median(errors(learner, true)) < 0.15


def test_the_mean_of_such_samples_is_far_off():
    """Shows that the test above can fail."""
    draw = random.Random(0)
    ratios = [measured(draw, 1.0) for _ in range(200)]

    assert sum(ratios) / len(ratios) > 3.0


@ENGINES
@pytest.mark.parametrize("seed", range(4))
def test_an_outlier_as_first_sample_is_corrected(true, seed):
    learner = SpeedLearner()
    first = some_steps(random.Random(seed), "both")
    learner.learn(msgspec.structs.replace(first, seconds=80 * seconds_of(true, first)))
    teach(learner, true, random.Random(seed), 60)

    assert median(errors(learner, true)) < 0.5


@ENGINES
@pytest.mark.parametrize("factor", [0.5, 2.0, 5.0])
def test_a_change_of_speed_is_followed_within_a_hundred_samples(true, factor):
    learner, draw = SpeedLearner(), random.Random(3)
    teach(learner, true, draw, 300)
    slower = StepTimeModel(*(factor * one for one in true))
    assert median(errors(learner, slower)) > 0.4

    teach(learner, slower, draw, 100)

    assert median(errors(learner, slower)) < 0.3


TINY_ON_CPU = StepTimeModel(
    prefill_step_s=0.001,
    prefill_token_s=1 / 20_000,
    prefill_pair_s=1 / 20_000 / 16_000,
    decode_step_s=0.0045,
    decode_request_s=0.0001,
    decode_context_token_s=1e-7,
)


@pytest.mark.parametrize("true", [TINY_ON_CPU, BIG_GPU, SMALL_CPU], ids=["tiny", "gpu", "cpu"])
@pytest.mark.parametrize("tokens_out", [1, 8, 32])
@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_a_start_that_was_five_times_too_slow_is_corrected_within_twenty_prompts(true, tokens_out, noise):
    """Two long prompts on a busy machine, then short ones; a report after each request, as of a worker with few."""
    counter, learner, draw = StepTotalsCounter(), SpeedLearner(), random.Random(1)

    def serve(tokens: int, slower: float) -> None:
        for done in [prefill(tokens, 0, 0.0), *[decode(1, tokens, 0.0)] * (tokens_out - 1)]:
            took_s = slower * seconds_of(true, done) * draw.lognormvariate(0.0, noise)
            counter.add(StepTotals(**msgspec.structs.asdict(msgspec.structs.replace(done, seconds=took_s))))
        learner.observe(counter.totals(), counter.prompt_totals())

    def predicted_to_true() -> float:
        return times_of(learner).prefill_s(prefill(200, 0, 0.0)) / seconds_of(true, prefill(200, 0, 0.0))

    for _ in range(2):
        serve(3000, slower=5.0)
    assert predicted_to_true() > 3.0
    for _ in range(20):
        serve(200, slower=1.0)

    assert 0.8 < predicted_to_true() < 1.25


def test_short_prompts_count_in_the_prefill_speed():
    counter = StepTotalsCounter()
    assert counter.prefill_tokens_per_s == 0.0
    for _ in range(100):
        counter.add(StepTotals(seconds=0.002, prefill_steps=1, prefill_tokens=10))
        counter.add(StepTotals(seconds=0.5, decode_steps=1, decode_requests=1))

    assert counter.prefill_tokens_per_s == pytest.approx(5000.0)
    assert counter.totals().seconds == pytest.approx(50.2)
    assert counter.prompt_totals() == StepTotals(seconds=pytest.approx(0.2), prefill_steps=100, prefill_tokens=1000)


def test_nothing_is_published_before_the_first_sample():
    assert SpeedLearner().speed is None


def test_one_prompt_scales_all_of_prefill_and_nothing_of_decode():
    learner, before = SpeedLearner(), DEFAULT_STEP_TIMES
    expected_s = before.prefill_step_s + 1000 * before.prefill_token_s + 500_000 * before.prefill_pair_s

    learner.learn(prefill(1000, 0, 10 * expected_s))

    known = times_of(learner)
    assert 1000 * known.prefill_token_s == pytest.approx(10 * 1000 * before.prefill_token_s, rel=0.3)
    assert known.prefill_step_s > 4 * before.prefill_step_s
    assert known.prefill_pair_s > 4 * before.prefill_pair_s
    assert known.decode_step_s == pytest.approx(before.decode_step_s)


def test_one_decode_step_scales_all_of_decode():
    learner, before = SpeedLearner(), DEFAULT_STEP_TIMES

    learner.learn(decode(1, 100, 0.1 * before.decode_step_s))

    known = times_of(learner)
    assert known.decode_step_s == pytest.approx(0.1 * before.decode_step_s, rel=0.3)
    assert known.decode_request_s < 0.3 * before.decode_request_s
    assert known.prefill_token_s == pytest.approx(before.prefill_token_s)


def totals_after(*steps: Steps | StepTotals) -> StepTotals:
    return StepTotals(**{name: sum(getattr(one, name) for one in steps) for name in StepTotals.__struct_fields__})


def test_the_first_totals_are_a_sample():
    done = some_steps(random.Random(1), "both")
    learner = SpeedLearner()

    assert learner.observe(totals_after(msgspec.structs.replace(done, seconds=seconds_of(BIG_GPU, done))))
    assert learner.speed is not None


def test_unchanged_totals_are_no_sample():
    done = some_steps(random.Random(1), "both")
    told = totals_after(msgspec.structs.replace(done, seconds=1.0))
    learner = SpeedLearner()
    learner.observe(told)
    known = learner.speed

    assert not learner.observe(told)
    assert learner.speed == known


def test_a_settled_estimate_is_learned_from_less_often():
    step = StepTotals(seconds=0.1, decode_steps=20, decode_requests=200, decode_context_tokens=20_000)
    learner, told = SpeedLearner(), StepTotals()
    samples = 0
    for _ in range(1000):
        told = totals_after(told, step)
        samples += learner.observe(told)

    assert 50 < samples < 60 + 1000 * step.seconds / LATER_SAMPLE_S


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e30])
def test_impossible_samples_change_nothing(seconds):
    learner = SpeedLearner()
    learner.learn(prefill(1000, 0, 0.1))
    known = learner.speed

    assert not learner.learn(prefill(1000, 0, seconds))
    assert not learner.learn(decode(5, 1000, seconds))
    assert not learner.observe(StepTotals(seconds=seconds, prefill_steps=1, prefill_tokens=1))
    assert not learner.learn(prefill(-5, 0, 0.1))
    assert learner.speed == known


def test_the_pairs_of_a_prompt_token_are_averaged():
    learner = SpeedLearner()
    for _ in range(50):
        learner.learn(prefill(1000, 3000, 0.2))

    assert learner.speed is not None
    assert learner.speed.pairs_per_token == pytest.approx(3500.0)


def worked(prompt_tokens: float, batch: float, steps: int, *, token_s: float, step_s: float, request_s: float) -> Steps:
    """Steps of which each computed a part of a prompt and one token of each request in the batch."""
    return Steps(
        seconds=prompt_tokens * token_s + (steps * step_s if batch else 0.0) + steps * batch * request_s,
        prefill_steps=float(steps if prompt_tokens else 0),
        prefill_tokens=prompt_tokens,
        decode_steps=float(steps if batch else 0),
        decode_requests=steps * batch,
    )


@given(st.floats(0.05, 50.0), st.floats(0.2, 5.0))
@settings(max_examples=examples(40), deadline=None)
def test_engines_of_any_scale_and_proportion_are_learned(scale: float, proportion: float):
    token_s, step_s, request_s = 2e-4 * scale, 0.01 * scale * proportion, 3e-4 * scale
    learner, dice = SpeedLearner(), random.Random(1)
    for _sample in range(100):
        tokens, batch = dice.choice([(0.0, 2.0 ** dice.uniform(0, 7)), (dice.uniform(1, 4e4), 0.0), (2e4, 32.0)])
        learner.learn(worked(tokens, batch, 1000, token_s=token_s, step_s=step_s, request_s=request_s))

    times = times_of(learner)
    for batch in (1.0, 16.0, 128.0):
        assert times.decode_step_of(batch, 0.0) == pytest.approx(step_s + batch * request_s, rel=0.15)
    prompts = worked(3e4, 0.0, 100, token_s=token_s, step_s=step_s, request_s=request_s)
    assert times.prefill_s(prompts) == pytest.approx(prompts.seconds, rel=0.15)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_cost_of_full_batches_outlasts_thousands_of_small_ones(noise: float):
    learner, draw = SpeedLearner(), random.Random(1)
    speed = {"token_s": 1e-4, "step_s": 0.004, "request_s": 5e-4}
    for batch in [*([2.0, 8.0, 30.0, 64.0, 90.0, 120.0] * 10), *([8.0] * 2000)]:
        done = worked(0.0, batch, 100, **speed)
        learner.learn(msgspec.structs.replace(done, seconds=done.seconds * draw.lognormvariate(0.0, noise)))

    assert times_of(learner).decode_step_of(100.0, 0.0) == pytest.approx(0.004 + 100 * 5e-4, rel=0.1)


def test_the_spread_shows_whether_batches_have_varied():
    def spread_of_requests(*batches: int) -> float:
        learner = SpeedLearner()
        for count in range(200):
            batch = batches[count % len(batches)]
            learner.learn(decode(batch, 100 * batch, BIG_GPU.decode_step_of(batch, 100.0)))
        assert learner.speed is not None
        return learner.speed.batch_spread

    assert spread_of_requests(8) > 2 * spread_of_requests(1, 32, 200)


def test_a_phase_without_samples_is_not_measured_and_taken_from_the_like():
    prefilled, both = SpeedLearner(), taught(SMALL_CPU, 50)
    for _ in range(10):
        prefilled.learn(prefill(1000, 0, 0.1))

    assert prefilled.speed is not None
    assert (is_measured(prefilled.speed), is_measured(both.speed)) == ((True, False), (True, True))
    filled = filled_in(prefilled.speed, both.speed)
    assert StepTimeModel.of(filled) == (*times_of(prefilled)[:3], *times_of(both)[3:])
    assert filled.batch_spread == both.speed.batch_spread
    assert filled_in(None, both.speed) == both.speed == filled_in(both.speed, prefilled.speed)
    assert filled_in(None, None) is None


def test_estimates_of_like_engines_combine():
    prefills, decodes = SpeedLearner(), SpeedLearner()
    for learner, kind in ((prefills, "prompts"), (decodes, "decoding")):
        for seed in range(100):
            done = some_steps(random.Random(seed), kind)
            learner.learn(msgspec.structs.replace(done, seconds=seconds_of(BIG_GPU, done)))
    assert prefills.speed is not None
    assert decodes.speed is not None
    whole = combined([prefills.speed, decodes.speed, prefills.speed])

    assert max(errors(whole, BIG_GPU)) < 0.3
    assert combined([]) is None
    assert StepTimeModel.of(combined([whole])) == pytest.approx(StepTimeModel.of(whole))


@pytest.mark.parametrize(
    "nonsense",
    [
        {"decode_step_s": float("nan")},
        {"prefill_token_s": 0.0},
        {"batch_spread": -1.0},
        {"decode_samples": float("inf")},
    ],
    ids=["NaN", "free", "negative", "infinite"],
)
def test_estimates_that_cannot_be_computed_with_are_invalid(nonsense: dict):
    speed = taught(BIG_GPU, 1).speed
    assert speed is not None

    assert is_valid(speed)
    assert not is_valid(msgspec.structs.replace(speed, **nonsense))


@pytest.mark.parametrize(
    "nonsense",
    [
        NO_STEPS,
        Steps(seconds=1.0),
        Steps(seconds=1.0, decode_steps=10.0, prefill_tokens=-5.0),
        Steps(seconds=1.0, decode_steps=10.0, prefill_pairs=float("nan")),
    ],
    ids=["nothing", "no work", "negative", "NaN"],
)
def test_impossible_work_is_no_sample(nonsense: Steps):
    learner = SpeedLearner()

    assert not learner.learn(nonsense)
    assert learner.speed is None
