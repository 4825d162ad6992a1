"""The study's intervals: they hold what they claim, pairing narrows them, and nothing is dropped."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from bench.study import samples, statistics
from bench.study.results import Slo
from bench.study.samples import Samples
from bench.study.statistics import Pool, compared, measured
from replay.legs import ReplayedRequest
from replay.traces import Request

SLO = Slo(ttft_s=1.0, itl_s=0.1)


def run_of(ttft_s: np.ndarray, *, tokens: np.ndarray | None = None) -> Samples:
    count = len(ttft_s)
    ones = np.ones(count)
    return Samples(
        due_s=np.arange(count) * 1.0,
        prompt_tokens=ones * 100 if tokens is None else tokens,
        output_tokens=ones * 10,
        ttft_s=ttft_s,
        tpot_s=ones * 0.05,
        cached_tokens=ones * 0,
        fetched_tokens=ones * 0,
    )


def correlated(seed: int, *, count: int = 600) -> np.ndarray:
    """Times that are alike for as long as half a window: what a queue does."""
    rng = np.random.default_rng(seed)
    return np.repeat(rng.lognormal(-0.5, 1.0, count // 25), 25) * rng.lognormal(0.0, 0.1, count)


@pytest.mark.slow
def test_the_interval_contains_the_truth_about_as_often_as_it_claims():
    truth = np.mean(np.concatenate([correlated(10_000 + seed) for seed in range(400)]) <= SLO.ttft_s)
    held = 0
    for trial in range(60):
        pool = Pool([run_of(correlated(100 * trial + seed)) for seed in range(5)], SLO)
        found = measured(pool, ["good_share"])["good_share"]
        held += found.low <= truth <= found.high

    assert held >= 50  # of 60; 57 are expected


def test_requests_of_one_window_do_not_count_as_independent():
    runs = [run_of(correlated(seed)) for seed in range(5)]
    rng = np.random.default_rng(1)
    mixed = [run_of(rng.permutation(run.ttft_s)) for run in runs]
    widths = [
        found.high - found.low
        for found in (measured(Pool(each, SLO), ["good_share"])["good_share"] for each in (runs, mixed))
    ]

    assert widths[0] > 2 * widths[1]


def test_a_paired_difference_finds_what_unpaired_intervals_hide():
    bases = [correlated(seed) for seed in range(5)]
    slow, fast = (Pool([run_of(base * factor) for base in bases], SLO) for factor in (1.0, 0.9))
    difference = compared(fast, slow, ["ttft_p95"])["ttft_p95"]
    alone = [measured(pool, ["ttft_p95"])["ttft_p95"] for pool in (fast, slow)]

    assert difference.below_zero
    assert difference.value == pytest.approx(-0.1, abs=0.01)
    assert alone[0].high > alone[1].low


def test_equal_policies_differ_by_nothing():
    pool = Pool([run_of(correlated(seed)) for seed in range(3)], SLO)

    assert set(compared(pool, pool).values()) == {statistics.Interval(0.0, 0.0, 0.0)}


def test_runs_of_other_requests_are_not_compared():
    one, other = (Pool([run_of(correlated(seed, count=count))], SLO) for seed, count in ((1, 600), (1, 300)))

    with pytest.raises(ValueError, match="same requests"):
        compared(one, other)


def test_a_rejected_request_makes_the_percentile_infinite_and_the_comparison_says_by_all():
    rejecting = np.where(np.arange(600) % 10 == 0, inf, 0.1)
    one, other = Pool([run_of(np.full(600, 0.5))], SLO), Pool([run_of(rejecting)], SLO)

    assert measured(other, ["ttft_p95"])["ttft_p95"].value == inf
    assert compared(one, other, ["ttft_p95"])["ttft_p95"].value == -1.0
    assert compared(other, one, ["ttft_p95"])["ttft_p95"].value == inf
    assert compared(one, other, ["good_share"])["good_share"].value == pytest.approx(1 / 0.9 - 1)


def test_tokens_weigh_requests_by_their_length():
    tokens = np.where(np.arange(600) % 2, 990.0, 90.0)
    found = measured(Pool([run_of(np.where(np.arange(600) % 2, inf, 0.1), tokens=tokens)], SLO))

    assert found["good_share"].value == pytest.approx(0.5)
    assert found["good_tokens_share"].value == pytest.approx(0.1 / 1.1)


def test_samples_survive_being_stored_with_what_was_not_served():
    requests = [Request(0.0, (), 100, 3), Request(1.0, (), 200, 3)]
    outcomes = [
        ReplayedRequest(0, requests[0], (), first_token_at=0.5, finished_at=0.7, cached_tokens=5),
        ReplayedRequest(1, requests[1], (), refused_at=1.0),
    ]
    found = samples.decode(samples.samples_of(requests, outcomes).encode())

    assert found.ttft_s.tolist() == [0.5, inf]
    assert found.tpot_s.tolist() == [pytest.approx(0.1), inf]
    assert (found.due_s.tolist(), found.cached_tokens.tolist()) == ([0.0, 1.0], [5.0, 0.0])
    assert found.good(1.0, 0.2).tolist() == [True, False]
