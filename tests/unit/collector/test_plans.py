"""The planner's decisions as numbers."""

from __future__ import annotations

import msgspec

from services.collector.metrics.fleet_metrics import PLAN_STALE_S_MAX, PlanView
from shared.contracts.planning import Demand, PlanAction, PlanDecision, RoleCount
from shared.contracts.workers import Role

DECISION = PlanDecision(
    number=1,
    at_ms=0,
    model="m",
    fingerprint="old",
    demand=Demand(),
    roles=[RoleCount(role=Role.PREFILL, now=1, wanted=2, load=0.9), RoleCount(role=Role.DECODE, now=1, wanted=1)],
    action=PlanAction.SCALE,
    role=Role.PREFILL,
    change=1,
)


def test_a_change_with_a_later_outcome_counts_once():
    view = PlanView()
    view.update(DECISION, 0.0)
    view.update(msgspec.structs.replace(DECISION, outcome="+1 prefill begun"), 1.0)

    assert view.changes == {("scale", "prefill"): 1}


def test_revisions_add_their_workers_and_show_the_higher_load():
    view = PlanView()
    view.update(DECISION, 0.0)
    newer = msgspec.structs.replace(
        DECISION, fingerprint="new", roles=[RoleCount(role=Role.PREFILL, now=1, wanted=1, load=0.2)]
    )
    view.update(newer, 0.0)

    assert view.wanted() == {("m", "prefill"): 3, ("m", "decode"): 1}
    assert view.load()["m", "prefill"] == 0.9


def test_plans_that_are_not_renewed_disappear():
    view = PlanView()
    view.update(DECISION, 0.0)
    view.expire(PLAN_STALE_S_MAX)

    assert view.wanted() == {}
    assert view.changes
