"""Every system is tuned with the same budget, and its frozen values are used."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.policies.systems import UnknownPolicyError, parse
from bench.study.cli import app
from bench.study.experiment import Setting
from bench.study.results import Slo
from bench.study.tuning import FROZEN, TUNED, Frozen, Tuned, points_of, read_frozen, score, tune
from tests.support.replay_worlds import PROFILE, THREE, conversations, write_mooncake

SETTING = Setting(requests=conversations(40), split=THREE, profile=PROFILE, slo=Slo(ttft_s=0.2), seed=1)


def tuned(**values: float) -> Tuned:
    return Tuned(values=values, score=1.0, default_score=0.5, tried=[])


@pytest.mark.parametrize("policy", TUNED)
def test_every_system_gets_as_many_points_the_defaults_first_and_none_twice(policy):
    points = points_of(parse(policy), 6, seed=1)
    names = [parse(policy).named(point) for point in points]

    assert points[0] == {}
    assert len(points) == len(set(names)) == min(6, len(points_of(parse(policy), 10**6, seed=1)))
    assert all(parse(name).values for name in names[1:])
    assert points == points_of(parse(policy), 6, seed=1)


def test_the_best_point_is_chosen_and_the_defaults_score_is_kept():
    ((policy, chosen),) = tune(SETTING, [1.0, 2.0], ["mooncake+edf+refuse"], points=6)

    assert policy == "mooncake+edf+refuse"
    assert chosen.score == max(one.score for one in chosen.tried)
    assert chosen.default_score == chosen.tried[0].score == score(SETTING, [1.0, 2.0], policy)
    assert len({one.score for one in chosen.tried}) > 1
    assert score(SETTING, [1.0, 2.0], parse(policy).named(chosen.values)) == chosen.score


def test_a_cell_of_the_factorial_takes_the_values_of_its_rule_as_far_as_it_has_them(tmp_path):
    budget = read_frozen().budget
    frozen = Frozen(
        budget=budget,
        systems={
            "mooncake": tuned(threshold=4),
            "mooncake+edf+refuse": tuned(threshold=2, room=8, margin=0.7, own_weight=2),
        },
    )

    assert frozen.name("mooncake") == "mooncake[threshold=4]"
    assert frozen.name("mooncake+sjf") == "mooncake+sjf[room=8,threshold=2]"
    assert frozen.name("mooncake+refuse") == "mooncake+refuse[margin=0.7,threshold=2]"
    assert frozen.name("mooncake+refuse[margin=1]") == "mooncake+refuse[margin=1,threshold=2]"
    assert frozen.name("random+fcfs") == "random+fcfs"
    with pytest.raises(UnknownPolicyError):
        frozen.name("nobody")


def test_the_frozen_choices_are_of_this_code_and_of_one_budget():
    frozen = read_frozen()

    assert set(frozen.systems) == set(TUNED)
    for policy, one in frozen.systems.items():
        system = parse(frozen.name(policy))
        assert len(one.tried) == len(points_of(system, frozen.budget.points, frozen.budget.seed))
        assert one.score == max(point.score for point in one.tried) >= one.default_score


def test_the_command_writes_choices_that_can_be_read(tmp_path):
    trace, out = write_mooncake(tmp_path / "trace.jsonl", conversations(30)), tmp_path / "tuned.json"
    options = ["--loads", "1,2", "--points", "2", "--fleet", "2B", "--out", str(out)]
    done = CliRunner().invoke(app, ["tune", str(trace), *options, "--policy", "dynamo", "--policy", "random"])

    assert done.exit_code == 0, done.output
    assert "dynamo" in done.output
    frozen = read_frozen(out)
    assert (frozen.budget.trace, frozen.budget.requests, frozen.budget.loads) == ("trace.jsonl", 30, [1.0, 2.0])
    assert {policy: len(one.tried) for policy, one in frozen.systems.items()} == {"dynamo": 2, "random": 1}
    assert read_frozen(FROZEN).budget.points >= 2


def test_the_command_refuses_an_unknown_policy(tmp_path):
    trace = write_mooncake(tmp_path / "trace.jsonl", conversations(3))
    done = CliRunner().invoke(app, ["tune", str(trace), "--loads", "1", "--policy", "nobody"])

    assert done.exit_code == 2
    assert "no policy" in done.output
