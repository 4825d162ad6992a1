"""Of the requests that are said to meet a target with 60 %, 60 % do, in replays of engines whose times vary."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from bench.study.experiment import Setting, run_with_outcomes
from bench.study.results import Slo
from bench.study.workloads import generate
from replay.legs import ReplayedRequest
from replay.profile import PROFILES
from replay.split import Split
from services.router.decisions.odds import UNKNOWN, ModelOdds

SLO = Slo(ttft_s=5.0, itl_s=0.1)
LOAD, REQUESTS, NOISE = 95.0, 3000, 0.3
"""More than the engines can serve, so that requests wait; without noise hardly any first token would be uncertain."""
BOUNDS = (0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0 + 1e-9)
TOLERANCE = 0.15
"""How far a group's share may be from what was said: each has at least 30 requests, a standard error of 9 %."""

Said = list[tuple[float, bool]]
"""Probabilities of a target, with whether it was met."""


@cache
def served(policy: str, seed: int) -> list[ReplayedRequest]:
    profile = replace(PROFILES["8b"], noise=NOISE)
    requests = generate("extracts", REQUESTS, seed=seed)
    setting = Setting(requests=requests, split=Split(both=8), profile=profile, slo=SLO, seed=seed)
    return [one for one in run_with_outcomes(setting, policy, LOAD)[1] if one.finished_at is not None]


def said(policy: str, seed: int) -> tuple[Said, Said]:
    """As a router would say it: at placement, from the requests that have ended by then. TTFT and ITL."""
    odds, ttft, itl = ModelOdds(), Said(), Said()
    ends = [(one.finished_at, True, one) for one in served(policy, seed)]
    begins = [(one.placed_at, False, one) for one in served(policy, seed)]
    for at, has_ended, one in sorted([*begins, *ends], key=lambda event: event[:2]):
        predicted_s, predicted_itl_s = one.placement.predicted.total_s(), one.placement.predicted_itl_s
        if not has_ended:
            left_s = SLO.ttft_s - (at - one.request.at_s)
            ttft.append((odds.ttft.probability(predicted_s, left_s), one.ttft_s <= SLO.ttft_s))
            itl.append((odds.itl.probability(predicted_itl_s, SLO.itl_s), one.tpot_s <= SLO.itl_s))
            continue
        odds.ttft.learn(predicted_s, one.first_token_at - one.placed_at)
        if one.request.output_tokens > 1:
            odds.itl.learn(predicted_itl_s, one.tpot_s)
    return [one for one in ttft if one[0] != UNKNOWN], [one for one in itl if one[0] != UNKNOWN]


def groups(said_of: Said) -> list[tuple[int, float, float]]:
    """By probability: how many requests, what was said of them on average, and which share met the target."""
    probability, met = np.array([one for one, _ in said_of]), np.array([one for _, one in said_of])
    inside = [(low <= probability) & (probability < high) for low, high in pairwise(BOUNDS)]
    return [(int(one.sum()), float(probability[one].mean()), float(met[one].mean())) for one in inside if one.any()]


def test_first_tokens_are_in_time_as_often_as_said():
    """Without targets nobody is refused, so all shares from none to all occur."""
    found = groups([one for seed in (201, 202, 203) for one in said("baton-default", seed)[0]])

    assert len(found) == len(BOUNDS) - 1
    for count, expected, met in found:
        assert count >= 30
        assert abs(expected - met) <= TOLERANCE


def test_times_between_tokens_are_in_time_as_often_as_said():
    """Admission waits, refuses and leaves gaps, which hold most of them near the target."""
    found = groups(said("baton-waiting", 201)[1])
    count = sum(one for one, _expected, _met in found)

    assert sum(one * abs(expected - met) for one, expected, met in found) / count <= 0.05
    assert 0.1 < sum(one * met for one, _expected, met in found) / count < 0.9
