"""Whatever the load, a choice respects the limits, and is not undone by the next one under the same load."""

from __future__ import annotations

import dataclasses

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from services.orchestrator.planner.change import Change, Possible, RoleLoad, choose
from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.work import Observed
from shared.contracts.planning import PlanAction
from shared.contracts.workers import Role

RULES = Rules()
COUNTS = st.integers(0, 12)
WORK = st.floats(0.0, 30.0)
LOAD_MAX = st.floats(0.3, 0.85)
ANYTHING = Possible()


def may(grow: bool, shrink: bool) -> Possible:
    return Possible(no_growth="" if grow else "no", no_removal="" if shrink else "no")


@st.composite
def fleets(draw: st.DrawFn) -> list[RoleLoad]:
    """Prefill and decode workers under a load that stays as it is."""
    roles = []
    for role in (Role.PREFILL, Role.DECODE):
        work, load_max = draw(WORK), draw(LOAD_MAX)
        roles.append(of(role, draw(COUNTS), draw(st.integers(0, 2)), work, load_max))
    return roles


def of(role: Role, ready: int, coming: int, work: float, load_max: float) -> RoleLoad:
    observed = Observed(now=work, lasting=work, spare=work, hold=work)
    return RoleLoad(role, ready, coming, 0.0, observed, lambda _workers: load_max, 1, "its work")


def after(choice: Change, roles: list[RoleLoad]) -> list[RoleLoad]:
    """The fleet when the change is done."""
    changed = []
    for each in roles:
        more = choice.change if choice.role is each.role else 0
        if choice.action is PlanAction.CHANGE_ROLE:
            more = 1 if choice.role is each.role else -1
        ready = each.ready + each.coming + more if choice.action is not PlanAction.NOTHING else each.ready
        changed.append(of(each.role, ready, 0, each.observed.now, each.load_max(1.0)))
    return changed


@given(fleets(), st.integers(0, 16), st.integers(1, 8), st.booleans(), st.booleans())
def test_limits_are_kept(roles: list[RoleLoad], most: int, least: int, can_grow: bool, can_shrink: bool):
    rules = msgspec.structs.replace(RULES, workers_max=most, workers_min=least)
    choice = choose(roles, rules, may(can_grow, can_shrink))

    before = sum(each.ready + each.coming for each in roles)
    total = sum(each.ready for each in after(choice, roles))
    assert choice.why
    if choice.change > 0:
        assert can_grow
        assert choice.change <= rules.step_max
        assert not most or total <= max(most, before)
    if choice.change < 0:
        assert can_shrink
        assert choice.change == -1
        assert total >= least
    if choice.action is PlanAction.CHANGE_ROLE or choice.change < 0:
        lost = [each for each in after(choice, roles) if each.ready < each.minimum]
        assert not [each for each in lost if each.role is choice.giver or choice.change < 0]


@given(fleets(), st.booleans())
def test_a_change_is_never_undone_under_the_same_load(roles: list[RoleLoad], can_grow: bool):
    first = choose(roles, RULES, may(can_grow, True))
    assume(first.action is not PlanAction.NOTHING)
    second = choose(after(first, roles), RULES, may(can_grow, True))

    if first.action is PlanAction.SCALE and first.change > 0:
        assert not (second.role is first.role and second.change < 0)
        assert second.giver is not first.role
    if first.action is PlanAction.SCALE and first.change < 0:
        assert not (second.role is first.role and (second.change > 0 or second.action is PlanAction.CHANGE_ROLE))
    if first.action is PlanAction.CHANGE_ROLE:
        assert not (second.action is PlanAction.CHANGE_ROLE and second.giver is first.role)


@given(fleets())
def test_changes_come_to_an_end_under_the_same_load(roles: list[RoleLoad]):
    for _change in range(200):
        choice = choose(roles, RULES, ANYTHING)
        if choice.action is PlanAction.NOTHING:
            break
        roles = after(choice, roles)
    else:
        raise AssertionError("it changes for ever")
    assert not [each for each in roles if each.is_short]


def test_a_role_starved_by_the_other_has_no_spare_workers():
    full, waiting = of(Role.PREFILL, 1, 0, 3.0, 0.85), of(Role.DECODE, 2, 0, 0.4, 0.85)
    calm = of(Role.PREFILL, 1, 0, 1.0, 0.85)

    assert choose([full, waiting], RULES, ANYTHING).action is PlanAction.SCALE
    assert choose([calm, waiting], RULES, ANYTHING).action is PlanAction.CHANGE_ROLE


def test_a_worker_that_a_growing_role_may_soon_need_is_not_removed():
    idle = of(Role.PREFILL, 4, 0, 0.1, 0.85)
    steady, doubling = of(Role.DECODE, 2, 0, 1.2, 0.85), of(Role.DECODE, 2, 0, 1.2, 0.85)
    doubling = dataclasses.replace(doubling, observed=dataclasses.replace(doubling.observed, lasting=0.6))

    assert choose([idle, steady], RULES, ANYTHING).change == -1
    kept = choose([idle, doubling], RULES, ANYTHING)
    assert kept.action is PlanAction.NOTHING
    assert "decode has 1.2 workers' worth of work for 2 now (its work) and may need it" in kept.why


def test_a_role_gets_no_more_than_it_may_have():
    full, idle = of(Role.DECODE, 1, 0, 2.0, 0.85), of(Role.PREFILL, 4, 0, 0.1, 0.85)

    for count, action in ((1, PlanAction.NOTHING), (2, PlanAction.CHANGE_ROLE)):
        choice = choose([idle, full], RULES, Possible(counts_max={Role.DECODE: (count, "it has enough")}))
        assert choice.action is action
        assert (choice.wanted, "it has enough" in choice.why) == ((2, False) if choice.wanted else (0, True))


def test_a_role_that_gives_none_is_said_to():
    full, idle = of(Role.DECODE, 1, 0, 2.0, 0.85), of(Role.PREFILL, 4, 0, 0.1, 0.85)

    possible = Possible(no_growth="no GPU", gives_none={Role.PREFILL: "all prefill workers refuse"})
    assert choose([idle, full], RULES, possible).why.endswith(
        "no worker can be added (no GPU); all prefill workers refuse"
    )
