"""The live check can fail: by failed requests, by another ranking, by sides that differ."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import fields
from math import inf

import msgspec
import pytest

from bench.bench_live_replay import apart, failures, misranked, router_settings, summarise, worker_settings
from bench.live_client import Outcome
from bench.policies import BATON_DEFAULT, BATON_WAITING
from bench.study.results import Result, Slo
from replay.profile import PROFILES
from replay.spread import Spread
from replay.traces import Request
from services.worker.engines.simulated.core.settings import StepTiming
from services.worker.settings import Settings
from shared.runtime.settings import load

SLO = Slo()
METRICS = "baton_router_prompt_tokens_total 1000.0\nbaton_router_cached_tokens_actual_total 100.0\n"


def outcome(at_s: float = 0.0, *, status: int = 200, ttft_s: float = 1.0, events: int = 3, sent_s: float = 0.01):
    request = Request(at_s, (), 1000, 3)
    return Outcome(request, status, at_s + sent_s, at_s + ttft_s, at_s + ttft_s + 0.05, events)


def result(policy: str, p95: float, *, p50: float = 1.0, hits: float = 0.1) -> Result:
    of = summarise((policy, 1.0), [outcome(), outcome(1.0)], SLO, METRICS)
    return msgspec.structs.replace(of, ttft=Spread(p50=p50, p95=p95), hit_share=hits)


def test_what_failed_or_was_cut_short_is_late_and_not_good():
    found = summarise(("p", 1.0), [outcome(), outcome(1.0, status=500), outcome(2.0, events=2)], SLO, METRICS)

    assert (found.refused, found.ttft.p50, found.ttft.p95, found.tpot.p95) == (2, inf, inf, inf)
    assert found.good_share == pytest.approx(1 / 3)
    assert found.good_tokens_share == pytest.approx(1 / 3)


def test_a_live_router_knows_targets_where_the_policy_does():
    options = Namespace(router=["ROUTER_QUEUE_S_MAX=5"])

    told = router_settings(BATON_WAITING, SLO, options)

    assert json.loads(told.pop("ROUTER_SLOS")) == {"default": {"ttft_s": SLO.ttft_s, "itl_s": SLO.itl_s}}
    assert told == router_settings(BATON_DEFAULT, SLO, options) == {"ROUTER_QUEUE_S_MAX": "5"}


@pytest.mark.parametrize("name", PROFILES)
def test_live_engines_are_those_of_the_replay(name):
    replayed = PROFILES[name]
    live = load(Settings, "WORKER_", worker_settings(name))

    for speed in (field.name for field in fields(StepTiming) if field.name != "transfer_bytes_per_s"):
        assert getattr(live.profile, speed) == getattr(replayed, speed), speed
    assert (live.block_size, live.legs_max) == (replayed.block_tokens, replayed.max_num_seqs)
    link_tokens_per_s = live.profile.transfer_bytes_per_s / live.profile.kv_bytes_per_token
    assert link_tokens_per_s == pytest.approx(replayed.transfer_bytes_per_s / replayed.kv_bytes_per_token)


def test_failures_are_problems_and_rejections_are_not():
    rejected = [outcome(status=503), outcome(status=429)]

    assert failures("p", [outcome(), *rejected], SLO) == []
    assert failures("p", [outcome(), outcome(status=-1), outcome(events=1), outcome(events=1)], SLO) == [
        "p: 1 requests failed (status -1)",
        "p: 2 requests failed (cut short)",
    ]


def test_a_client_that_sends_late_is_a_problem():
    (problem,) = failures("p", [outcome(sent_s=0.6), outcome(sent_s=0.7)], SLO)

    assert "late" in problem


def test_policies_that_are_ranked_the_other_way_live_are_a_problem():
    virtual = [result("a", 1.0), result("b", 2.0), result("c", 2.1)]

    assert misranked(virtual, [result("a", 1.0), result("b", 2.5), result("c", 2.4)]) == []
    assert misranked(virtual, [result("a", 2.0), result("b", 1.9), result("c", 3.0)]) == [
        "TTFT p95: a is ahead of b in virtual time only"
    ]
    assert misranked([result("a", 1.0), result("b", inf)], [result("a", inf), result("b", inf)])


def test_sides_that_differ_by_more_than_allowed_are_a_problem():
    virtual, live = [result("a", 1.0, hits=0.1)], [result("a", 1.2, hits=0.07)]

    assert apart(virtual, live, inf) == []
    assert apart(virtual, live, 0.25) == ["a: cache hits is 0.1 in virtual time and 0.07 live"]
    assert len(apart(virtual, live, 0.1)) == 2
    assert apart([result("a", inf)], [result("a", inf)], 0.1) == []
    assert len(apart([result("a", 1.0)], [result("a", inf)], 0.5)) == 1
