"""Policies by name: rules with queue and refusal, on small traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies import BATON, BATON_DEFAULT, BATON_WAITING
from bench.policies.queueing import NOBODY, BusyGate, QueueContext, RoomGate, SaturationGate
from bench.policies.systems import RULES, SHIPPED, UnknownPolicyError, make_rule, names, parse, sweep_of
from bench.study.experiment import Setting, install, run
from bench.study.results import Slo
from replay.legs import ReplayedRequest
from replay.split import Split
from replay.traces import Request
from services.router.placement.placement import PlacementRequest
from services.router.placement.slo import NO_TARGETS
from tests.support.fleet_builders import load
from tests.support.replay_worlds import PROFILE, THREE, context, conversations, world

SETTING = Setting(requests=conversations(60), split=THREE, profile=PROFILE, slo=Slo(ttft_s=1.0, itl_s=0.1), seed=1)
ONE = Split(both=1)


def played(name, requests, split=ONE, setting=SETTING):
    of = world(split)
    install(of, name, setting)
    return of.run(requests)


def prompts(*tokens):
    """All at once, without common blocks."""
    return [Request(index * 1e-3, (), one, 2) for index, one in enumerate(tokens)]


def order_of(outcomes: list[ReplayedRequest]) -> list[int]:
    return [one.number for one in sorted(outcomes, key=lambda one: one.first_token_at)]


@pytest.mark.parametrize("split", [THREE, Split(prefill=2, decode=2)], ids=["both", "apart"])
@pytest.mark.parametrize("suffix", ["+fcfs", "+sjf", "+edf", "+refuse", "+fcfs+refuse", "+sjf+refuse", "+edf+refuse"])
@pytest.mark.parametrize("rule", [BATON, "mooncake", "sglang", "dynamo"])
def test_every_cell_of_the_factorial_serves_or_refuses_each_request(rule, suffix, split):
    outcomes = played(rule + suffix, conversations(40), split)

    assert all((one.finished_at is None) == (one.refused_at is not None) for one in outcomes)
    if "refuse" not in suffix:
        assert all(one.refused_at is None for one in outcomes)


@pytest.mark.parametrize("name", [*SHIPPED, *RULES])
def test_every_system_runs_at_its_defaults_and_at_each_other_value(name):
    for one in [name, *sweep_of(name)]:
        result = run(replace(SETTING, requests=conversations(25)), one, 1.0)
        assert result.policy == one
        assert result.goodput_per_s > 0


@pytest.mark.parametrize(
    ("suffix", "order"),
    [
        ("+fcfs", [0, 1, 2, 3]),
        ("+sjf", [0, 2, 3, 1]),
        ("+edf[own_weight=0]", [0, 1, 2, 3]),
        ("+edf[own_weight=1]", [0, 2, 3, 1]),
    ],
)
def test_waiting_requests_leave_the_queue_in_the_order_that_was_asked_for(suffix, order):
    outcomes = played("random" + suffix, prompts(8000, 20_000, 4000, 9000))

    assert order_of(outcomes) == order


def test_dynamos_queue_goes_by_arrival_or_by_uncached_tokens():
    requests = prompts(8000, 20_000, 4000, 9000)

    assert order_of(played("dynamo-queue[busy=0]", requests)) == [0, 1, 2, 3]
    assert order_of(played("dynamo-queue[busy=0,wspt=1]", requests)) == [0, 2, 3, 1]
    assert order_of(played("dynamo-queue[busy=100,wspt=1]", requests)) == [0, 1, 2, 3]


def test_a_worker_gets_no_request_while_it_is_full_and_another_is_not():
    of = world(THREE)
    around = QueueContext(fleet=of.fleet, counts=of.counts, profile=PROFILE, targets=NO_TARGETS)
    full, other, last = of.workers
    of.counts.active[full].prefill_tokens = of.counts.active[other].prefill_tokens = 4097

    assert RoomGate(around, 2.0).excluded() == {full, other}
    assert BusyGate(around, 2.0).excluded() == NOBODY
    of.counts.active[last].prefill_tokens = 4097
    assert RoomGate(around, 2.0).excluded() is None
    assert BusyGate(around, 2.0).excluded() is None
    assert RoomGate(around, 2.5).excluded() == NOBODY


def test_llm_ds_gate_closes_when_the_mean_worker_is_saturated():
    of = world(Split(both=2))
    around = QueueContext(fleet=of.fleet, counts=of.counts, profile=PROFILE, targets=NO_TARGETS)

    def reports(*each):
        for worker_id, (waiting, used) in zip(of.workers, each, strict=True):
            of.fleet.cluster.report(load(worker_id, waiting=waiting, kv_tokens_used=used, kv_tokens_total=100), 0.5)
        return SaturationGate(around).excluded()

    assert reports((9, 0), (0, 0)) == NOBODY  # 1.8 and 0
    assert reports((10, 0), (0, 8)) is None  # 2 and 0.1
    assert reports((5, 20), (0, 80)) is None  # 1 and 1


def test_a_queue_excludes_full_workers_from_every_rule():
    of = world(THREE)
    install(of, "random", SETTING)
    of.counts.replayed = ReplayedRequest(0, Request(0.0, (), 100, 1), ())
    first, second, third = of.workers
    request = PlacementRequest(model="m", prompt_tokens=100, excluded=frozenset({first, third}))
    assert {of.fleet.place(request, 0.0).decode.record.worker_id for _ in range(20)} == {second}


def test_refusal_spares_the_engine_what_would_be_late_and_a_margin_refuses_more():
    requests = prompts(*[8000] * 8)  # 0.4 s each, within 1 s

    served = {
        name: [one.number for one in played(name, requests) if one.refused_at is None]
        for name in ("random+refuse", "random+refuse[margin=0.5]", "random+fcfs+refuse", "random+fcfs")
    }
    assert served == {
        "random+refuse": [0, 1],
        "random+refuse[margin=0.5]": [0],
        "random+fcfs+refuse": [0, 1],
        "random+fcfs": list(range(8)),
    }


def test_refusal_keeps_the_target_between_tokens():
    slow = replace(SETTING, profile=replace(PROFILE, decode_base_s=0.2))

    assert all(one.refused_at is not None for one in played("random+refuse", prompts(600), setting=slow))


def test_baton_without_targets_serves_what_baton_with_targets_refuses():
    requests = prompts(*[20_000] * 6)

    assert any(one.refused_at is not None for one in played(BATON_WAITING, requests))
    assert all(one.refused_at is None for one in played(BATON_DEFAULT, requests))


def test_names_are_read_and_written_alike():
    system = parse("mooncake+edf+refuse[margin=0.7,room=4]")

    assert (system.rule, system.order, system.refuse) == ("mooncake", "edf", True)
    assert (system.value("margin"), system.value("room"), system.value("threshold")) == (0.7, 4.0, 1.0)
    assert system.named(system.values) == "mooncake+edf+refuse[margin=0.7,room=4]"
    assert all(parse(name).named({}) == name for name in names())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", "no policy"),
        ("mooncake+later", "no policy"),
        ("mooncake[margin=1]", "no parameter margin"),
        ("baton-waiting+edf", "its own queue"),
        ("mooncake[room=x]", "no policy"),
    ],
)
def test_an_unknown_policy_or_parameter_is_named(name, says):
    with pytest.raises(UnknownPolicyError, match=says):
        parse(name)


def test_a_live_router_takes_rules_alone():
    of = world(THREE)

    assert make_rule("dynamo[scale=4]")(context(of)) is not None
    with pytest.raises(UnknownPolicyError, match="no placement rule alone"):
        make_rule("dynamo+edf")
