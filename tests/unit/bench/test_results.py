"""The measures of a run: what is late, what is good, and what a rejected request counts."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest

from bench.study.results import Result, Slo, buckets_markdown_of, spread_of, spread_of_counts, summarise
from replay.legs import ReplayedRequest
from replay.profile import bucket_of
from replay.traces import Request

SLO = Slo(ttft_s=5.0, itl_s=0.1)


def served(number: int, *, ttft_s: float = 1.0, tpot_s: float = 0.01, tokens: int = 2000, out: int = 11):
    request = Request(float(number), (), tokens, out)
    first_at = request.at_s + ttft_s
    return ReplayedRequest(
        number, request, (), first_token_at=first_at, finished_at=first_at + tpot_s * (out - 1), cached_tokens=500
    )


def rejected(number: int, *, tokens: int = 2000, out: int = 11):
    return ReplayedRequest(number, Request(float(number), (), tokens, out), (), refused_at=float(number))


def result_of(*outcomes: ReplayedRequest) -> Result:
    return summarise(("policy", 1.0, "label"), outcomes, [], SLO, 0.0)


def test_a_rejected_request_is_late_in_every_percentile():
    result = result_of(*(served(number) for number in range(90)), *(rejected(90 + number) for number in range(10)))

    assert result.refused == 10
    assert (result.ttft.p50, result.ttft.p95, result.tpot.p95) == (1.0, inf, inf)
    assert result.good_share == pytest.approx(0.9)


def test_where_nothing_was_served_every_percentile_is_infinite():
    assert result_of(rejected(0), rejected(1)).ttft.p50 == inf
    assert spread_of([], 3).p50 == spread_of_counts(Counter(), 3).p50 == inf


def test_tokens_that_were_never_made_are_late():
    made = Counter({bucket_of(0.02): 90})

    assert spread_of_counts(made).p99 == pytest.approx(0.02, rel=0.02)
    assert spread_of_counts(made, 10).p50 == pytest.approx(0.02, rel=0.02)
    assert spread_of_counts(made, 10).p95 == inf


@pytest.mark.parametrize(("ttft_s", "tpot_s", "good"), [(4.9, 0.09, 1), (5.1, 0.09, 0), (4.9, 0.11, 0)])
def test_goodput_needs_both_targets(ttft_s, tpot_s, good):
    result = result_of(served(0), served(10, ttft_s=ttft_s, tpot_s=tpot_s))

    assert result.goodput_per_s == pytest.approx((1 + good) / 10)


def test_goodput_by_tokens_tells_what_rejecting_long_prompts_costs():
    result = result_of(*(served(number, tokens=990, out=10) for number in range(9)), rejected(9, tokens=90_990, out=10))

    assert result.good_share == pytest.approx(0.9)
    assert result.good_tokens_share == pytest.approx(9_000 / 100_000)
    assert result.goodput_tokens_per_s == pytest.approx(9_000 / 9)


def test_buckets_say_which_lengths_were_served():
    result = result_of(
        served(0, tokens=100),
        served(1, tokens=1024, ttft_s=9.0),
        rejected(2, tokens=1025),
        served(3, tokens=70_000),
        rejected(4, tokens=80_000),
    )

    assert [(one.tokens_min, one.requests, one.served_share, one.good_share) for one in result.buckets] == [
        (1, 1, 1.0, 1.0), (1024, 2, 0.5, 0.0), (65_536, 2, 0.5, 0.5),
    ]  # fmt: skip
    assert "| policy | 100.0 / 100.0 | 50.0 / 0.0 | 50.0 / 50.0 |" in buckets_markdown_of([result])


def test_hits_are_shares_of_what_was_served():
    assert result_of(served(0), rejected(1)).hit_share == pytest.approx(500 / 2000)
