"""The planner on made-up traffic, hours of it: it follows lasting changes, ignores short ones, and does not
oscillate.
"""

from __future__ import annotations

import math
import re
from itertools import groupby, pairwise

import msgspec
import pytest

from services.orchestrator.planner.family import by_family
from services.orchestrator.planner.planner import Planner
from services.orchestrator.planner.rules import ModelRules, Rules
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from tests.support.fleet_builders import FINGERPRINT, record
from tests.support.planner_worlds import TICK_S, Curve, PlannerWorld, Traffic, steady

HOUR_S = 3600.0
RULES = Rules()
ROLES_ONLY = {"scaler": lambda _decision: 0}


def day_and_night(at: float) -> Traffic:
    """From 1 to 15 requests a second and back, every hour."""
    return Traffic(8.0 - 7.0 * math.cos(at / HOUR_S * 2 * math.pi))


def spikes(at: float) -> Traffic:
    """Six times as much for ten seconds of every two minutes."""
    return Traffic(6.0 if at % 120.0 < 10.0 else 1.0)


def prompts_then_answers(at: float) -> Traffic:
    """Half an hour of long prompts with short answers, then half an hour of the contrary."""
    return Traffic(8.0, 2000.0, 50.0) if at % HOUR_S < HOUR_S / 2 else Traffic(8.0, 200.0, 800.0)


def prompts_come_after_two_minutes(at: float) -> Traffic:
    """Until then a little of both."""
    return Traffic(1.0 if at < 120.0 else 8.0, 2000.0, 20.0)


def longest_wait(world: PlannerWorld, since: float) -> float:
    return max(wait for at, wait in world.waits if at >= since)


def test_a_fleet_that_fits_its_traffic_is_left_alone():
    world = PlannerWorld(RULES, steady(2.0), noise=0.3).run(HOUR_S)

    assert world.changes == []


@pytest.mark.slow
def test_more_traffic_adds_prefill_and_decode_workers_until_queues_are_empty():
    world = PlannerWorld(RULES, steady(12.0)).run(HOUR_S / 2)

    assert {role for _at, role, change in world.scalings() if change > 0} == {Role.PREFILL, Role.DECODE}
    assert longest_wait(world, HOUR_S / 4) < RULES.ttft_s


@pytest.mark.slow
def test_a_models_own_limits_hold_for_it_alone():
    for model, most in (("m", 3), ("another", 8)):
        rules = msgspec.structs.replace(RULES, workers_max=8, models={model: ModelRules(workers_max=3)})

        world = PlannerWorld(rules, steady(20.0)).run(HOUR_S / 2)

        assert max(prefills + decodes for _at, prefills, decodes in world.sizes) == most


@pytest.mark.slow
def test_noise_moves_nothing_to_and_fro():
    world = PlannerWorld(RULES, steady(10.0), noise=0.3).run(HOUR_S)

    # At first there is too little and a queue to be worked off; then what that took may go.
    assert all(world.reversals(role) <= 1 for role in (Role.PREFILL, Role.DECODE))
    assert len(world.changes) <= 10


@pytest.mark.slow
def test_the_fleet_follows_day_and_night_with_one_reversal_at_noon():
    world = PlannerWorld(RULES, day_and_night, noise=0.2).run(HOUR_S)

    for role in (Role.PREFILL, Role.DECODE):
        assert world.reversals(role) == 1
        assert max(size for _at, *sizes in world.sizes for size in sizes) >= 5
    assert max(world.count(Role.PREFILL), world.count(Role.DECODE)) <= 2
    assert longest_wait(world, 0.0) < 3 * RULES.ttft_s


def test_short_spikes_change_nothing():
    world = PlannerWorld(RULES, spikes).run(HOUR_S)

    assert world.scalings() == []


@pytest.mark.slow
def test_in_a_full_fleet_roles_follow_the_traffic_one_at_a_time():
    world = PlannerWorld(RULES, prompts_then_answers, prefill=3, decode=3, noise=0.2, **ROLES_ONLY).run(1.5 * HOUR_S)

    assert [role for role, _run in groupby(role for _at, role in world.switches())] == [Role.DECODE, Role.PREFILL]
    assert len(world.switches()) <= 6


def answers_grow(at: float, rate: float = 8.0) -> Curve:
    """Long prompts for three minutes, hardly anything until ``at``, then short prompts with long answers."""

    def curve(now: float) -> Traffic:
        if now < 180.0:
            return Traffic(8.0, 2000.0, 50.0)
        return Traffic(0.5, 2000.0, 50.0) if now < at else Traffic(rate, 200.0, 600.0)

    return curve


def too_slow_s(world: PlannerWorld, since: float) -> float:
    """For how long the time between tokens was above the target."""
    return sum(TICK_S for at, itl_s in world.itls if at >= since and itl_s > RULES.itl_s)


def test_while_decode_fills_up_no_prefill_worker_is_removed_and_one_changes_its_role():
    """Its removal is due some seconds after decode's overload begins."""
    began = 480.0
    rules = msgspec.structs.replace(RULES, workers_max=6)
    world = PlannerWorld(rules, answers_grow(began), prefill=4, decode=1).run(began + 300.0)

    changes = [(at, each) for at, each in world.changes if at >= began]
    at, first = changes[0]
    assert (first.action, first.role) == (PlanAction.CHANGE_ROLE, Role.DECODE)
    assert "requests decode where" in first.why
    assert at - began <= 40.0
    assert too_slow_s(world, began) <= 60.0


def test_an_overload_does_not_wait_until_the_last_change_has_shown():
    rules = msgspec.structs.replace(RULES, workers_max=6)
    calm = PlannerWorld(rules, answers_grow(HOUR_S), prefill=4, decode=1)
    while not calm.scalings():
        calm.run(TICK_S)
    removed_at = calm.now
    calm.curve = answers_grow(removed_at)
    calm.run(RULES.cool_down_s)

    assert [change for _at, _role, change in calm.scalings()] == [-1]
    assert [role for _at, role in calm.switches()][:1] == [Role.DECODE]
    assert calm.switches()[0][0] - removed_at <= 40.0


def test_an_overload_that_no_single_worker_ends_gets_all_that_can_be_had():
    """Decode needs four times as many workers as it has; two places are free, and prefill can spare two."""
    rules = msgspec.structs.replace(RULES, workers_max=6)
    began = 240.0
    world = PlannerWorld(rules, answers_grow(began, 12.0), prefill=3, decode=1).run(began + 300.0)

    assert world.count(Role.DECODE) >= 4
    assert too_slow_s(world, began) <= 120.0


def test_a_role_whose_workers_refuse_to_change_does_not_keep_new_workers_away():
    rules = msgspec.structs.replace(RULES, refused_s=HOUR_S)
    world = PlannerWorld(rules, prompts_come_after_two_minutes, prefill=2, decode=3)

    def refuse(decision: PlanDecision) -> None:
        world.planner.set_outcome(decision, done=False, outcome="no", now=world.now)

    world._carry_out = refuse
    world.run(600.0)

    actions = [each.action for _at, each in world.changes]
    assert actions == [*[PlanAction.CHANGE_ROLE] * 3, PlanAction.SCALE]


def test_a_spare_worker_changes_role_before_workers_are_added():
    world = PlannerWorld(RULES, prompts_come_after_two_minutes, prefill=2, decode=3).run(300.0)

    _at, first = world.changes[0]
    assert (first.action, first.role) == (PlanAction.CHANGE_ROLE, Role.PREFILL)
    assert "can spare one" in first.why


@pytest.mark.slow
def test_workers_that_do_both_are_scaled_as_such():
    world = PlannerWorld(RULES, day_and_night, prefill=0, decode=0, both=1).run(HOUR_S)

    assert {role for _at, role, _change in world.scalings()} == {Role.BOTH}
    assert world.reversals(Role.BOTH) == 1


def test_a_queue_is_demand_that_the_engines_have_not_seen():
    world = PlannerWorld(RULES, steady(4.0))
    world.run(40.0)
    calm = world.last
    world.queued_tokens += 1_000_000
    world.run(60.0)

    assert calm is not None
    assert world.last is not None
    assert world.last.roles[0].load > 2 * calm.roles[0].load
    assert world.last.demand.queue_s > 1.0


def test_only_the_phase_that_is_full_is_blamed_for_the_queue():
    world = PlannerWorld(RULES, steady(9.0, completion_tokens=20.0)).run(200.0)

    assert {role for _at, role, _change in world.scalings()} == {Role.PREFILL}


@pytest.mark.parametrize("curve", [steady(0.0), steady(0.01)])
def test_the_last_worker_of_each_role_stays_however_idle_it_is(curve: Curve):
    world = PlannerWorld(RULES, lambda at: Traffic(2.0) if at < 120 else curve(at), prefill=3, decode=2).run(HOUR_S)

    assert (world.count(Role.PREFILL), world.count(Role.DECODE)) == (1, 1)


@pytest.mark.slow
def test_a_fleet_keeps_its_least_and_its_most():
    rules = msgspec.structs.replace(RULES, workers_min=4, workers_max=6)
    calm = PlannerWorld(rules, lambda at: Traffic(3.0) if at < 120 else Traffic(0.0), prefill=3, decode=2)
    full = PlannerWorld(rules, steady(40.0), prefill=3, decode=2)

    assert len(calm.run(HOUR_S).workers) == 4
    assert max(sum(sizes) for _at, *sizes in full.run(HOUR_S / 2).sizes) == 6


def test_nothing_is_decided_while_a_load_report_is_missing():
    world = PlannerWorld(RULES, steady(12.0))
    world.workers[0].reports = False
    world.run(300.0)

    assert world.changes == []
    assert world.last is not None
    assert "w0 does not report" in world.last.why


def test_nothing_is_decided_before_an_engine_was_seen_at_work():
    world = PlannerWorld(RULES, steady(0.0), prefill=3, decode=3).run(HOUR_S)

    assert world.changes == []
    assert world.last is not None
    assert "speed is not known" in world.last.why


def test_a_new_leader_keeps_quiet_until_its_predecessors_changes_have_shown():
    world = PlannerWorld(RULES, steady(1.0)).run(300.0)
    world.curve = steady(12.0)
    world.planner.leads(world.now)
    began = world.now
    world.run(120.0)

    assert world.changes[0][0] - began >= RULES.cool_down_s


@pytest.mark.slow
def test_after_a_change_nothing_else_is_changed_before_it_has_shown():
    world = PlannerWorld(RULES, day_and_night).run(HOUR_S / 2)

    assert all(later - earlier >= RULES.cool_down_s for (earlier, _), (later, _) in pairwise(world.changes))


def test_what_was_refused_is_not_asked_for_again_at_once():
    world = PlannerWorld(RULES, steady(12.0), **ROLES_ONLY).run(600.0)

    assert len(world.scalings()) > 1
    assert all(later[0] - earlier[0] >= RULES.refused_s for earlier, later in pairwise(world.scalings()))


def test_workers_that_were_asked_for_count_before_they_are_there():
    world = PlannerWorld(msgspec.structs.replace(RULES, step_max=1), steady(7.0, completion_tokens=20.0))
    world.scaler = lambda _decision: 1
    world._scale = lambda _role, _change: None  # it was promised, and nothing is to be seen of it yet
    world.run(RULES.start_s_max / 2)

    # The queue grows all the time, so more are asked for, each time beside those who are on their way.
    asked_with = [int(re.findall(r"work for (\d+)", decision.why)[0]) for _at, decision in world.changes]
    assert asked_with == list(range(1, len(asked_with) + 1))
    assert len(asked_with) > 2


@pytest.mark.slow
def test_a_tight_ttft_target_lowers_the_load_of_prefill_workers():
    loose = PlannerWorld(msgspec.structs.replace(RULES, ttft_s=10.0), steady(6.0)).run(HOUR_S / 4)
    tight = PlannerWorld(msgspec.structs.replace(RULES, ttft_s=0.35), steady(6.0)).run(HOUR_S / 4)

    assert tight.count(Role.PREFILL) > loose.count(Role.PREFILL)


@pytest.mark.slow
def test_a_tight_itl_target_adds_decode_workers():
    loose = PlannerWorld(msgspec.structs.replace(RULES, itl_s=0.1), steady(10.0)).run(HOUR_S / 4)
    tight = PlannerWorld(msgspec.structs.replace(RULES, itl_s=0.006), steady(10.0)).run(HOUR_S / 4)

    assert tight.count(Role.DECODE) > loose.count(Role.DECODE)


def test_the_least_busy_worker_changes_role_and_refusals_pause():
    rules = msgspec.structs.replace(RULES, refused_s=HOUR_S)
    world = PlannerWorld(rules, prompts_come_after_two_minutes, prefill=2, decode=3)
    asked = []

    def refuse(decision):
        asked.append(decision.worker_id)
        world.planner.set_outcome(decision, done=False, outcome="stays decode", now=world.now)

    world._carry_out = refuse
    world.run(400.0)

    assert asked[:3] == ["w2", "w3", "w4"]


def test_stores_and_workers_of_other_models_are_not_counted():
    world = PlannerWorld(RULES, steady(2.0)).run(60.0)
    fleet = world.fleet()
    store = msgspec.structs.replace(
        fleet[0], record=msgspec.structs.replace(fleet[0].record, worker_id="s", role=Role.STORE)
    )
    other = msgspec.structs.replace(
        fleet[0], record=msgspec.structs.replace(fleet[0].record, worker_id="o", models=["other"])
    )

    decisions = world.planner.plan([*fleet, store, other], world.now + 1.0, 0)

    assert [(each.model, sum(role.now for role in each.roles)) for each in decisions] == [("m", 2), ("other", 1)]


def beside(**differs: str) -> PlannerWorld:
    """A fleet that has too much to do, and a worker of its model that is of another fingerprint."""
    world = PlannerWorld(RULES, steady(12.0))
    alone = world.fleet
    other = record("new", WorkerPhase.READY, 1, Role.BOTH, **differs)
    world.fleet = lambda: [*alone(), FleetWorker(record=other, phase=WorkerPhase.READY, since_s=1.0, silent_s=0.0)]
    return world.run(300.0)


def test_only_the_full_revision_of_a_model_gets_workers():
    world = beside(revision="another")

    assert {(each.action, each.revision) for _at, each in world.changes} == {(PlanAction.SCALE, FINGERPRINT.revision)}


def test_an_ambiguous_revision_gets_no_workers():
    world = beside(connector="another")

    assert world.changes == []
    assert world.last is not None


def test_beside_both_workers_a_role_needs_no_worker_of_its_own():
    world = PlannerWorld(RULES, steady(2.0), prefill=0, decode=1, both=2).run(300.0)

    assert world.changes == []


def test_a_fleet_without_ready_workers_is_reported_and_not_changed():
    planner = Planner(RULES, 0.0)
    starting = PlannerWorld(RULES, steady(0.0)).fleet()
    starting = [msgspec.structs.replace(each, phase=WorkerPhase.STARTING) for each in starting]

    [decision] = planner.plan(starting, 1.0, 0)

    assert decision.action is PlanAction.NOTHING
    assert "no worker is ready" in decision.why


def test_a_starting_worker_counts_for_the_revision_of_its_settings():
    def worker(name: str, phase: WorkerPhase, **more: str) -> FleetWorker:
        written = record(name, phase, 1, Role.BOTH, **more)
        return FleetWorker(record=written, phase=phase, since_s=1.0, silent_s=0.0)

    served = [worker(f"old{n}", WorkerPhase.READY, revision="v1") for n in range(2)]
    served.append(worker("new0", WorkerPhase.READY, revision="v2"))
    starting = [
        worker("new1", WorkerPhase.STARTING, revision="v2", connector=""),
        worker("any", WorkerPhase.STARTING, revision="", connector=""),
    ]

    families = {
        served[0].record.fingerprint.revision: [each.record.worker_id for each in served]
        for served in by_family([*starting, *served]).values()
    }

    assert families == {"v1": ["old0", "old1", "any"], "v2": ["new0", "new1"]}


def test_workers_attached_to_servers_outside_are_left_alone():
    engine, attached = record("w1"), record("a1", attached=True)
    workers = [FleetWorker(record=one, phase=one.phase, since_s=1.0, silent_s=0.1) for one in (engine, attached)]

    assert [[each.record.worker_id for each in family] for family in by_family(workers).values()] == [["w1"]]
