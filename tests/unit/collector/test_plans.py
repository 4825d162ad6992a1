"""The planner's decisions as numbers."""

from __future__ import annotations

import msgspec

from services.collector.metrics.plans import STALE_S_MAX, PlanView
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


def test_a_change_counts_once_though_it_is_told_again_with_its_outcome():
    view = PlanView()
    view.told(DECISION, 0.0)
    view.told(msgspec.structs.replace(DECISION, outcome="+1 prefill begun"), 1.0)

    assert view.changes == {("scale", "prefill"): 1}


def test_two_revisions_of_a_model_are_added_and_the_fuller_one_shows_its_load():
    view = PlanView()
    view.told(DECISION, 0.0)
    newer = msgspec.structs.replace(
        DECISION, fingerprint="new", roles=[RoleCount(role=Role.PREFILL, now=1, wanted=1, load=0.2)]
    )
    view.told(newer, 0.0)

    assert view.wanted() == {("m", "prefill"): 3, ("m", "decode"): 1}
    assert view.load()["m", "prefill"] == 0.9


def test_what_nobody_looks_at_any_more_is_not_shown():
    view = PlanView()
    view.told(DECISION, 0.0)
    view.expire(STALE_S_MAX)

    assert view.wanted() == {}
    assert view.changes
