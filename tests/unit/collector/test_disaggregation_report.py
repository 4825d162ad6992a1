"""The disaggregation report says yes, no or unsure for each range of prompt lengths."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.aggregated_estimate import WINDOW_S, FleetWork, Latencies
from services.collector.disaggregation_report import (
    SAMPLES_MIN,
    STARTS,
    TOKENS_MAX,
    ReportBuilder,
    compare,
    decide,
    estimate,
    medians,
    sample_of,
    summary_of,
)
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import RequestFinished
from shared.contracts.load import StepTotals
from shared.contracts.planning import DisaggregationReport, ReportBucket
from shared.contracts.workers import Role
from shared.engine_speed.learner import SpeedLearner
from shared.engine_speed.steps import Steps, StepTimeModel
from tests.support.fleet_builders import load

MODEL = StepTimeModel(prefill_step_s=0.002, prefill_token_s=4e-5, decode_step_s=0.008, decode_request_s=5e-5)
SILENT_S_MAX = 10.0
STEP_TOKENS = 2048
PARTS = TtftParts(queue_s=0.01, prefill_s=0.08, handoff_s=0.02, front_end_and_bus_s=0.005)


def finished(mode: str = "disaggregated", **facts: object) -> RequestFinished:
    defaults: dict[str, object] = {
        "request_id": "r",
        "model": "m",
        "path": "/v1/completions",
        "mode": mode,
        "status": 200,
        "prefill_worker": "p1" if mode == "disaggregated" else "",
        "decode_worker": "d1",
        "prompt_tokens": 2000,
        "cached_tokens": 0,
        "completion_tokens": 101,
        "ttft_s": PARTS.total_s(),
        "itl_s": 0.009,
        "e2e_s": PARTS.total_s() + 0.9,
        "ttft_parts": PARTS,
    }
    return RequestFinished(**{**defaults, **facts})  # type: ignore[arg-type]


class Fleet:
    """Engines p1 and d1 that follow the step-time model and report every second."""

    def __init__(self) -> None:
        self.builder = ReportBuilder(SILENT_S_MAX)
        self.now = 0.0
        self._totals = {"p1": StepTotals(), "d1": StepTotals()}
        self._learners = {"p1": SpeedLearner(), "d1": SpeedLearner()}
        self._chance = random.Random(3)

    def work(
        self, seconds: int, prefills_per_s: float = 2.0, batch: tuple[int, int] = (1, 8), slower: float = 1.0
    ) -> None:
        self._more("p1")
        self._more("d1")
        self.builder.request_finished(finished(status=500), self.now)  # Assigns the engines to the model.
        for _second in range(seconds):
            self.now += 1.0
            prompts = round(prefills_per_s + self._chance.uniform(-1, 1))
            each = self._chance.randint(*batch)
            steps = int(0.9 / (MODEL.decode_step_s + each * MODEL.decode_request_s))
            self._more("p1", prefill_steps=prompts, prefill_tokens=2000 * prompts)
            self._more("d1", slower, decode_steps=steps, decode_requests=each * steps)

    def _more(self, worker_id: str, slower: float = 1.0, **work: int) -> None:
        before = self._totals[worker_id]
        whole = {name: getattr(before, name) + more for name, more in work.items()}
        took_s = slower * sum(getattr(MODEL, PART_OF[name]) * more for name, more in work.items())
        steps = msgspec.structs.replace(before, seconds=before.seconds + took_s, **whole)
        self._totals[worker_id] = steps
        role = Role.PREFILL if worker_id == "p1" else Role.DECODE
        learner = self._learners[worker_id]
        learner.observe(steps)
        self.builder.load_reported(load(worker_id, role=role, steps=steps, speed=learner.speed), self.now)

    def finish(self, count: int, mode: str = "disaggregated", **facts: object) -> None:
        for _ in range(count):
            self.builder.request_finished(finished(mode, **facts), self.now)

    def report(self) -> DisaggregationReport:
        return self.builder.build("", self.now, lambda _model: STEP_TOKENS)

    def only(self) -> ReportBucket:
        (bucket,) = self.report().buckets
        return bucket


PART_OF = {
    "prefill_steps": "prefill_step_s",
    "prefill_tokens": "prefill_token_s",
    "decode_steps": "decode_step_s",
    "decode_requests": "decode_request_s",
}


def test_enough_aggregated_requests_are_the_measurement():
    fleet = Fleet()
    fleet.finish(SAMPLES_MIN)
    fleet.finish(SAMPLES_MIN, "aggregated", ttft_s=0.2, itl_s=0.02, e2e_s=2.2)

    row = fleet.only()
    assert (row.worth, row.measured) == ("yes", True)
    assert (row.other_ttft_s, row.other_itl_s, row.other_e2e_s) == (0.2, 0.02, 2.2)
    assert (row.disaggregated, row.aggregated) == (SAMPLES_MIN, SAMPLES_MIN)


def test_aggregated_requests_on_decode_workers_make_it_unsure():
    fleet = Fleet()
    fleet.work(2)
    fleet.finish(SAMPLES_MIN)
    fleet.finish(SAMPLES_MIN, "aggregated", ttft_s=0.05, itl_s=0.005, e2e_s=0.5)

    row = fleet.only()
    assert (row.worth, row.measured) == ("unsure", True)
    assert "hardly any prompts" in row.reason


def test_mostly_cached_prompts_are_not_compared_with_uncached_ones():
    fleet = Fleet()
    fleet.work(60)
    fleet.finish(SAMPLES_MIN)
    fleet.finish(SAMPLES_MIN, "aggregated", cached_tokens=1900, ttft_s=0.01, itl_s=0.008, e2e_s=0.8)

    assert not fleet.only().measured


def test_the_estimate_raises_itl_by_the_share_of_prefill():
    fleet = Fleet()
    fleet.work(120, prefills_per_s=8.0)
    fleet.finish(SAMPLES_MIN)

    row = fleet.only()
    busy = 8 * (MODEL.prefill_step_s + 2000 * MODEL.prefill_token_s) / 2
    assert (row.worth, row.measured) == ("yes", False)
    assert row.other_itl_s / row.itl_s == pytest.approx(1 / (1 - busy), rel=0.1)
    assert row.ttft_s < row.other_ttft_s + PARTS.handoff_s + 0.02


def test_an_idle_fleet_does_not_need_disaggregation():
    fleet = Fleet()
    fleet.work(120, prefills_per_s=0.5, batch=(1, 2))
    fleet.finish(SAMPLES_MIN)

    row = fleet.only()
    assert (row.worth, row.measured) == ("no", False)
    assert row.other_ttft_s < row.ttft_s


def test_a_load_beyond_aggregated_engines_makes_it_pay_off():
    prompts = Steps(prefill_steps=36.0, prefill_tokens=70_000.0)
    completions = Steps(decode_steps=40.0, decode_requests=20_000.0)
    work = FleetWork(
        engines=4, prefills=3, decodes=1, work=prompts + completions, prefill_work=prompts, decode_work=completions
    )
    sample = sample_of(finished())
    assert sample is not None

    alternative = estimate([sample] * SAMPLES_MIN, work, [MODEL], STEP_TOKENS)

    assert alternative.overloaded
    assert decide(medians([sample]), alternative) == ("yes", "aggregated engines could not carry this load")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda fleet: fleet.finish(SAMPLES_MIN - 2), "only 18 requests"),
        (lambda fleet: fleet.finish(SAMPLES_MIN), "too few engine steps"),
        (lambda fleet: (fleet.work(60, batch=(6, 6)), fleet.finish(SAMPLES_MIN)), "hardly varied"),
        (lambda fleet: (fleet.work(60), fleet.finish(SAMPLES_MIN, itl_s=0.5)), "does not match"),
        (lambda fleet: fleet.finish(SAMPLES_MIN, "aggregated"), "only 0 requests"),
    ],
    ids=["few requests", "no steps", "one batch size", "model does not match", "none disaggregated"],
)
def test_missing_data_makes_it_unsure(prepare, reason: str):
    fleet = Fleet()
    fleet.work(1, batch=(6, 6))
    prepare(fleet)

    row = fleet.only()
    assert row.worth == "unsure"
    assert reason in row.reason


def test_only_smooth_requests_count():
    fleet = Fleet()
    for bad in (
        {"status": 503},
        {"attempts": 2},
        {"resumes": 1},
        {"completion_tokens": 1},
        {"ttft_parts": None},
        {"reason": "model_unknown", "model": "invented"},
    ):
        fleet.finish(1, **bad)

    assert fleet.report().buckets == []
    assert fleet.report().summary == "No requests were served recently."


def test_a_response_without_streaming_has_a_mean_itl():
    fleet = Fleet()
    fleet.finish(SAMPLES_MIN, itl_s=-1.0)

    assert fleet.only().itl_s == pytest.approx(0.009)


def test_length_ranges_cover_every_prompt_without_gaps():
    fleet = Fleet()
    for tokens in (1, 255, 256, 1023, 1024, 4096, 16384, 1_000_000):
        fleet.finish(1, prompt_tokens=tokens)

    row = fleet.report().buckets
    assert [(one.tokens_min, one.disaggregated) for one in row] == list(zip(STARTS, (2, 2, 1, 1, 2), strict=True))
    ends = [one.tokens_max for one in row]
    assert [*(start - 1 for start in STARTS[1:]), TOKENS_MAX] == ends


def test_old_requests_are_dropped():
    fleet = Fleet()
    fleet.finish(SAMPLES_MIN)
    fleet.now += WINDOW_S + 1

    assert fleet.report().buckets == []


def test_the_report_can_be_limited_to_one_model():
    fleet = Fleet()
    fleet.finish(1)
    fleet.finish(1, model="n")

    assert [one.model for one in fleet.builder.build("n", fleet.now, lambda _model: 1).buckets] == ["n"]
    assert len(fleet.report().buckets) == 2


seconds = st.floats(1e-4, 1e3)
latencies = st.builds(Latencies, ttft_s=seconds, itl_s=seconds, e2e_s=seconds)


@given(latencies, latencies, st.sampled_from([0.1, 0.2]))
def test_swapping_the_sides_never_keeps_a_yes(mine, other, margin):
    there, back = compare(mine, other, margin)[0], compare(other, mine, margin)[0]

    assert (there, back) != ("yes", "yes")
    assert (there == "unsure") == (back == "unsure")


def test_the_summary_follows_the_majority_of_requests():
    yes, no, unsure = (
        ReportBucket(model="m", tokens_min=1, tokens_max=2, disaggregated=count, worth=worth)
        for worth, count in (("yes", 60), ("no", 30), ("unsure", 10))
    )

    assert summary_of([yes, no, unsure]) == (
        "Disaggregation pays off: 60% of the requests are served better with separate prefill and decode workers."
    )
    assert summary_of([no, unsure]).startswith("Disaggregation does not pay off: 75%")
    assert summary_of([unsure]).startswith("Not known yet")
