"""A rank on another host never takes a lease for longer than it is, whatever its clock shows."""

from __future__ import annotations

import random

import pytest

from connector.scheduler.node_clocks import DRIFT, KEPT_S, NodeClocks

HOUR_S = 3600.0


@pytest.mark.parametrize("seed", range(50))
def test_the_schedulers_clock_as_a_rank_reckons_it_is_never_late_and_seldom_early(seed):
    dice = random.Random(seed)
    clocks, now, apart = NodeClocks(), dice.uniform(0.0, HOUR_S), dice.uniform(-HOUR_S, HOUR_S)
    rate = dice.uniform(-DRIFT, DRIFT)
    early: list[float] = []

    for number in range(1000):
        elapsed, delay = dice.expovariate(1.0), dice.choice((0.001, 0.002, 0.5, 5.0))
        now += elapsed
        apart += rate * elapsed
        if not number or dice.random() < 0.5:
            clocks.heard(3, now + apart, now + delay)
            now += delay
            apart += rate * delay
        reckoned = now + apart - clocks.ahead_s(now)[3]
        assert reckoned >= now - 1e-6
        early.append(reckoned - now)

    assert sorted(early)[len(early) // 2] < 0.1


def test_what_was_heard_before_a_host_was_suspended_is_forgotten():
    clocks = NodeClocks()
    clocks.heard(1, 1000.0, 0.0)

    clocks.heard(1, 1000.0 + KEPT_S - 30.0, KEPT_S)
    before = clocks.ahead_s(KEPT_S)[1]
    clocks.heard(1, 1001.0 + KEPT_S - 30.0, KEPT_S + 1.0)

    assert before == pytest.approx(1000.0 - DRIFT * KEPT_S)
    assert clocks.ahead_s(KEPT_S + 1.0)[1] == pytest.approx(970.0)
