"""What the collector says of prefill and decode apart: yes, no, or that it does not know."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.metrics.engine_work import WINDOW_S, FleetWork
from services.collector.report.aggregated import Latencies
from services.collector.report.report import (
    ENOUGH,
    STARTS,
    TOKENS_MAX,
    Judge,
    compared,
    decided,
    estimated,
    medians,
    sample_of,
    words,
)
from shared.contracts.decisions import TtftParts
from shared.contracts.disaggregation_report import DisaggregationReport, ReportBucket
from shared.contracts.inference import RequestFinished
from shared.contracts.load import StepTotals
from shared.contracts.workers import Role
from shared.engine_speed.learner import SpeedLearner
from shared.engine_speed.steps import Steps, StepTimeModel
from tests.support.fleet_builders import load

LAW = StepTimeModel(prefill_step_s=0.002, prefill_token_s=4e-5, decode_step_s=0.008, decode_request_s=5e-5)
SILENT_S_MAX = 10.0
STEP_TOKENS = 2048
PARTS = TtftParts(queue_s=0.01, prefill_s=0.08, handoff_s=0.02, transit_s=0.005)


def story(mode: str = "disaggregated", **facts: object) -> RequestFinished:
    told: dict[str, object] = {
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
    return RequestFinished(**{**told, **facts})  # type: ignore[arg-type]


class Fleet:
    """Engines p1 and d1 that work by the law, told of each second."""

    def __init__(self) -> None:
        self.judge = Judge(SILENT_S_MAX)
        self.now = 0.0
        self._totals = {"p1": StepTotals(), "d1": StepTotals()}
        self._learners = {"p1": SpeedLearner(), "d1": SpeedLearner()}
        self._chance = random.Random(3)

    def work(
        self, seconds: int, prefills_per_s: float = 2.0, batch: tuple[int, int] = (1, 8), slower: float = 1.0
    ) -> None:
        self._more("p1")
        self._more("d1")
        self.judge.request_finished(story(status=500), self.now)  # So that it is known which model these serve.
        for _second in range(seconds):
            self.now += 1.0
            prompts = round(prefills_per_s + self._chance.uniform(-1, 1))
            each = self._chance.randint(*batch)
            steps = int(0.9 / (LAW.decode_step_s + each * LAW.decode_request_s))
            self._more("p1", prefill_steps=prompts, prefill_tokens=2000 * prompts)
            self._more("d1", slower, decode_steps=steps, decode_requests=each * steps)

    def _more(self, worker_id: str, slower: float = 1.0, **work: int) -> None:
        before = self._totals[worker_id]
        whole = {name: getattr(before, name) + more for name, more in work.items()}
        took_s = slower * sum(getattr(LAW, PART_OF[name]) * more for name, more in work.items())
        steps = msgspec.structs.replace(before, seconds=before.seconds + took_s, **whole)
        self._totals[worker_id] = steps
        role = Role.PREFILL if worker_id == "p1" else Role.DECODE
        learner = self._learners[worker_id]
        learner.observe(steps)
        self.judge.load_reported(load(worker_id, role=role, steps=steps, speed=learner.speed), self.now)

    def finish(self, count: int, mode: str = "disaggregated", **facts: object) -> None:
        for _ in range(count):
            self.judge.request_finished(story(mode, **facts), self.now)

    def verdict(self) -> DisaggregationReport:
        return self.judge.verdict("", self.now, lambda _model: STEP_TOKENS)

    def only(self) -> ReportBucket:
        (bucket,) = self.verdict().buckets
        return bucket


PART_OF = {
    "prefill_steps": "prefill_step_s",
    "prefill_tokens": "prefill_token_s",
    "decode_steps": "decode_step_s",
    "decode_requests": "decode_request_s",
}


def test_where_enough_were_served_aggregated_they_are_the_measure():
    fleet = Fleet()
    fleet.finish(ENOUGH)
    fleet.finish(ENOUGH, "aggregated", ttft_s=0.2, itl_s=0.02, e2e_s=2.2)

    told = fleet.only()
    assert (told.worth, told.measured) == ("yes", True)
    assert (told.other_ttft_s, told.other_itl_s, told.other_e2e_s) == (0.2, 0.02, 2.2)
    assert (told.disaggregated, told.aggregated) == (ENOUGH, ENOUGH)


def test_few_that_ran_on_a_decode_worker_flatter_aggregated_serving():
    fleet = Fleet()
    fleet.work(2)
    fleet.finish(ENOUGH)
    fleet.finish(ENOUGH, "aggregated", ttft_s=0.05, itl_s=0.005, e2e_s=0.5)

    told = fleet.only()
    assert (told.worth, told.measured) == ("unsure", True)
    assert "hardly any prompts" in told.why


def test_requests_that_had_most_of_their_prompt_cached_are_no_measure_for_those_that_had_not():
    fleet = Fleet()
    fleet.work(60)
    fleet.finish(ENOUGH)
    fleet.finish(ENOUGH, "aggregated", cached_tokens=1900, ttft_s=0.01, itl_s=0.008, e2e_s=0.8)

    assert not fleet.only().measured


def test_an_engine_busy_with_prompts_would_be_slower_between_tokens_and_the_estimate_says_by_how_much():
    fleet = Fleet()
    fleet.work(120, prefills_per_s=8.0)
    fleet.finish(ENOUGH)

    told = fleet.only()
    busy = 8 * (LAW.prefill_step_s + 2000 * LAW.prefill_token_s) / 2
    assert (told.worth, told.measured) == ("yes", False)
    assert told.other_itl_s / told.itl_s == pytest.approx(1 / (1 - busy), rel=0.1)
    assert told.ttft_s < told.other_ttft_s + PARTS.handoff_s + 0.02


def test_an_idle_fleet_has_no_use_for_two_engines():
    fleet = Fleet()
    fleet.work(120, prefills_per_s=0.5, batch=(1, 2))
    fleet.finish(ENOUGH)

    told = fleet.only()
    assert (told.worth, told.measured) == ("no", False)
    assert told.other_ttft_s < told.ttft_s


def test_prompts_and_completions_that_would_fill_engines_that_do_both_make_it_worth_it():
    prompts = Steps(prefill_steps=36.0, prefill_tokens=70_000.0)
    completions = Steps(decode_steps=40.0, decode_requests=20_000.0)
    work = FleetWork(
        engines=4, prefills=3, decodes=1, work=prompts + completions, prefill_work=prompts, decode_work=completions
    )
    sample = sample_of(story())
    assert sample is not None

    other = estimated([sample] * ENOUGH, work, [LAW], STEP_TOKENS)

    assert other.overloaded
    assert decided(medians([sample]), other) == ("yes", "engines that do both could not carry this load")


@pytest.mark.parametrize(
    ("story_of", "words_of_it"),
    [
        (lambda fleet: fleet.finish(ENOUGH - 2), "only 18 of its"),
        (lambda fleet: fleet.finish(ENOUGH), "too little is known yet"),
        (lambda fleet: (fleet.work(60, batch=(6, 6)), fleet.finish(ENOUGH)), "hardly varied"),
        (lambda fleet: (fleet.work(60), fleet.finish(ENOUGH, itl_s=0.5)), "do not explain"),
        (lambda fleet: fleet.finish(ENOUGH, "aggregated"), "only 0 of"),
    ],
    ids=["few", "no law", "no variety", "unexplained", "nothing apart"],
)
def test_what_nobody_can_know_is_not_said(story_of, words_of_it: str):
    fleet = Fleet()
    fleet.work(1, batch=(6, 6))
    story_of(fleet)

    told = fleet.only()
    assert told.worth == "unsure"
    assert words_of_it in told.why


def test_only_requests_that_went_well_count():
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

    assert fleet.verdict().buckets == []
    assert fleet.verdict().words == "Nothing was served lately."


def test_an_answer_that_is_no_stream_has_a_time_between_tokens_too():
    fleet = Fleet()
    fleet.finish(ENOUGH, itl_s=-1.0)

    assert fleet.only().itl_s == pytest.approx(0.009)


def test_ranges_have_no_gaps_and_each_request_is_in_its_own():
    fleet = Fleet()
    for tokens in (1, 255, 256, 1023, 1024, 4096, 16384, 1_000_000):
        fleet.finish(1, prompt_tokens=tokens)

    told = fleet.verdict().buckets
    assert [(one.tokens_min, one.disaggregated) for one in told] == list(zip(STARTS, (2, 2, 1, 1, 2), strict=True))
    ends = [one.tokens_max for one in told]
    assert [*(start - 1 for start in STARTS[1:]), TOKENS_MAX] == ends


def test_what_is_old_is_forgotten():
    fleet = Fleet()
    fleet.finish(ENOUGH)
    fleet.now += WINDOW_S + 1

    assert fleet.verdict().buckets == []


def test_one_model_can_be_asked_for():
    fleet = Fleet()
    fleet.finish(1)
    fleet.finish(1, model="n")

    assert [one.model for one in fleet.judge.verdict("n", fleet.now, lambda _model: 1).buckets] == ["n"]
    assert len(fleet.verdict().buckets) == 2


seconds = st.floats(1e-4, 1e3)
latencies = st.builds(Latencies, ttft_s=seconds, itl_s=seconds, e2e_s=seconds)


@given(latencies, latencies, st.sampled_from([0.1, 0.2]))
def test_swapping_the_sides_never_keeps_a_yes(mine, other, margin):
    there, back = compared(mine, other, margin)[0], compared(other, mine, margin)[0]

    assert (there, back) != ("yes", "yes")
    assert (there == "unsure") == (back == "unsure")


def test_the_words_follow_most_of_the_requests():
    yes, no, unsure = (
        ReportBucket(model="m", tokens_min=1, tokens_max=2, disaggregated=count, worth=worth)
        for worth, count in (("yes", 60), ("no", 30), ("unsure", 10))
    )

    assert words([yes, no, unsure]) == (
        "It is worth it: 60% of the requests are better served with prefill and decode apart."
    )
    assert words([no, unsure]).startswith("It is not worth it: 75%")
    assert words([unsure]).startswith("Nobody can say yet")
