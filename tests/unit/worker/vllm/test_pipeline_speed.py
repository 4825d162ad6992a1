"""What the router learns of an engine with pipeline stages, from what vLLM says of its batches."""

from __future__ import annotations

import pytest

from services.worker.engines.simulated.core.settings import PROFILES
from services.worker.engines.vllm.steps import StepMeter
from shared.engine_speed.learner import SpeedLearner
from shared.engine_speed.steps import Steps, StepTimeModel
from tests.unit.worker.vllm.pipelined_engine import PipelinedEngine, Request

TIMING = PROFILES["8b"]
KV_TOKENS = 400_000
CHUNK = 2048
BURSTS = 8
STAGES = [1, 2, 4]


def learned(stages: int, requests: list[Request]) -> StepTimeModel:
    """What an engine learns of itself while it serves these."""
    meter, learner = StepMeter(stages), SpeedLearner()
    meter.tokens_per_use = KV_TOKENS

    def reported() -> None:
        if (totals := meter.totals()) is not None:
            learner.observe(totals, meter.counter.prompt_totals())

    PipelinedEngine(TIMING, stages, meter, reported, batch_tokens=CHUNK).run(requests)
    assert learner.speed is not None
    return StepTimeModel.of(learner.speed)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("size", [1, 8, 32, 128])
def test_the_time_between_tokens_is_that_of_the_way_through_all_stages(stages, size):
    """The prompts of a burst fill several batches, which decode apart from then on."""
    requests = [Request(40.0 * burst, 500, 200) for burst in range(BURSTS) for _ in range(size)]

    model = learned(stages, requests)

    for one in requests[-size:]:
        between_s = (one.token_times[-1] - one.token_times[100]) / 99
        assert 0.8 < model.decode_step_of(size, 650) / between_s < 1.25


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("chunks", [1, 4, 10])
def test_a_prompt_alone_takes_the_time_in_which_the_stages_fill_as_well(stages, chunks):
    requests = [Request(30.0 * number, chunks * CHUNK, 2) for number in range(20)]

    model = learned(stages, requests)

    tokens = chunks * CHUNK
    alone = Steps(prefill_steps=chunks, prefill_tokens=tokens, prefill_pairs=tokens * tokens / 2)
    took_s = requests[-1].token_times[0] - requests[-1].arrives_s
    assert 0.8 < model.prefill_s(alone) / took_s < 1.25


@pytest.mark.parametrize("stages", STAGES)
def test_prompts_in_a_row_take_what_one_stage_takes_of_each(stages):
    requests = [Request(20.0 * burst, CHUNK, 2) for burst in range(BURSTS) for _ in range(40)]

    model = learned(stages, requests)

    burst = requests[-40:]
    work = Steps(prefill_steps=40, prefill_tokens=40 * CHUNK, prefill_pairs=40 * CHUNK * CHUNK / 2)
    took_s = max(one.token_times[0] for one in burst) - burst[0].arrives_s
    assert 0.8 < model.prefill_s(work) / took_s < 1.25


def test_a_prompt_that_is_given_up_ends_its_step():
    """No token comes, and idle time is no part of what follows."""
    meter = StepMeter(2)
    engine = PipelinedEngine(TIMING, 2, meter, lambda: None)
    meter.tokens_per_use = KV_TOKENS
    engine.run([Request(0.0, 3 * CHUNK, 1, given_up=True), Request(100.0, CHUNK, 1)])

    assert meter.totals().seconds == pytest.approx(TIMING.step_s(CHUNK, CHUNK * CHUNK / 2, 0, 0))
    assert meter.totals().prefill_tokens == CHUNK
