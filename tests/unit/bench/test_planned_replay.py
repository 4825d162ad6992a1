"""The planner over a replayed fleet, in virtual time: it follows the day, loses nothing, and undoes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from bench.planned_replay import Delays
from bench.planned_runs import UNDONE_S, Course, run, splits, undone
from bench.planned_traffic import Traffic, traffic
from bench.study.results import Slo
from replay.profile import PROFILES
from replay.split import Split
from replay.traces import Request
from services.orchestrator.planner.rules import Rules
from shared.contracts.planning import Demand, PlanAction, PlanDecision
from shared.contracts.workers import Role

SLOW = replace(
    PROFILES["8b"],
    kv_blocks=200,
    max_num_seqs=16,
    prefill_tokens_per_s=800.0,
    prefill_s_per_pair=0.0,
    decode_base_s=0.05,
    decode_per_sequence_s=0.025,
    decode_per_context_token_s=0.0,
)
"""A long prompt takes 4 s; an engine decodes 32 tokens a second at most within the target."""
SLO = Slo(ttft_s=20.0, itl_s=0.25)
RULES = Rules(ttft_s=SLO.ttft_s, itl_s=SLO.itl_s)
DAY_H = 0.5


def trace(count: int, *, per_s: float, seed: int = 1) -> list[Request]:
    """By turns a long prompt with a short answer, and a short prompt with a long one."""
    rng = random.Random(seed)
    at_s, made = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(per_s)
        longest, answer = (600, 150) if number % 2 else (3500, 10)
        made.append(Request(at_s, (number,), rng.randint(longest - 200, longest), answer))
    return made


def course(wanted: Traffic) -> Course:
    requests = traffic(trace(200, per_s=0.4), wanted)
    return Course(
        requests=requests, profile=SLOW, slo=SLO, delays=Delays(start_s=40.0), hours=wanted.hours, admission=None
    )


def change(action: PlanAction, role: Role, by: int = 0) -> PlanDecision:
    return PlanDecision(number=1, at_ms=0, model="m", demand=Demand(), roles=[], action=action, role=role, change=by)


@pytest.mark.slow
def test_a_fleet_follows_the_day_and_nothing_is_lost_and_nothing_undone():
    outcome, world = run(
        course(Traffic(load=0.8, hours=DAY_H, swing=0.75, day_hours=DAY_H)), Split(prefill=1, decode=1), "", RULES
    )

    assert min(outcome.grown) >= 1
    assert outcome.workers_max > world.sizes[-1].all
    assert outcome.undone == 0
    assert outcome.good > 0.9
    for worker in (*world.workers.values(), *world.left):
        assert worker.legs == worker.engine.queued == 0
        assert worker.engine.pool.free == worker.engine.pool.blocks


@pytest.mark.slow
def test_roles_follow_each_shift_of_the_mix_once():
    rules = msgspec.structs.replace(RULES, workers_min=4, workers_max=4)
    outcome, world = run(course(Traffic(load=1.1, hours=0.4, turn_hours=0.4)), Split(prefill=2, decode=2), "", rules)

    assert {size.all for size in world.sizes} == {4}
    assert 2 <= outcome.switches <= 4
    assert outcome.undone == 0


def test_the_best_split_is_found_from_any_other():
    of = course(Traffic(load=0.9, hours=0.05))
    goods = {prefill: run(of, Split(prefill=prefill, decode=4 - prefill), "")[0].good for prefill in (1, 2, 3)}

    assert max(one.good for one in splits(of, Split(prefill=1, decode=3))) == max(goods.values())


def test_a_days_requests_keep_the_traces_order_with_new_contents_per_lap():
    made = traffic(trace(100, per_s=1.0), Traffic(load=2.0, hours=0.5, swing=0.5, day_hours=0.5))
    noon = [one for one in made if 600 <= one.at_s < 1200]

    assert len(made) == pytest.approx(2 * 1800, rel=0.15)
    assert len(noon) == pytest.approx(len(made) * (1 / 3 + 0.5 * 0.2757), rel=0.15)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    assert len({one.blocks for one in made}) == len(made)


def test_a_mix_shifts_from_long_prompts_to_long_answers():
    made = traffic(trace(100, per_s=1.0), Traffic(hours=0.5, turn_hours=0.5))

    assert {one.output_tokens for one in made if one.at_s < 880} == {10}
    assert {one.output_tokens for one in made if one.at_s > 960} == {150}


@pytest.mark.parametrize(
    ("first", "second", "is_undone"),
    [
        (change(PlanAction.SCALE, Role.DECODE, 2), change(PlanAction.SCALE, Role.DECODE, -1), True),
        (change(PlanAction.SCALE, Role.DECODE, 2), change(PlanAction.SCALE, Role.PREFILL, -1), False),
        (change(PlanAction.SCALE, Role.DECODE, 2), change(PlanAction.CHANGE_ROLE, Role.PREFILL), True),
        (change(PlanAction.CHANGE_ROLE, Role.DECODE), change(PlanAction.CHANGE_ROLE, Role.PREFILL), True),
        (change(PlanAction.CHANGE_ROLE, Role.DECODE), change(PlanAction.CHANGE_ROLE, Role.DECODE), False),
    ],
)
def test_a_change_is_undone_by_a_later_one_the_other_way(first, second, is_undone):
    assert bool(undone([(0.0, first), (UNDONE_S, second)], UNDONE_S)) is is_undone
    assert undone([(0.0, first), (UNDONE_S + 1.0, second)], UNDONE_S) == []
