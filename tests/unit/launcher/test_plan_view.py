"""The text of `baton plan`."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from services.launcher.views.reports import draw_plans
from shared.contracts.ids import WorkerId
from shared.contracts.planning import Demand, PlanAction, PlanDecision, Plans, RoleCount
from shared.contracts.workers import Role

DECISION = PlanDecision(
    number=3,
    at_ms=0,
    model="tiny",
    demand=Demand(requests_per_s=2.5, prompt_tokens=900, uncached_tokens=300, completion_tokens=40, seconds=30),
    roles=[RoleCount(role=Role.PREFILL, now=1, wanted=2, load=0.91), RoleCount(role=Role.DECODE, now=2, wanted=2)],
    action=PlanAction.NOTHING,
    why="decision 2 is being carried out",
)
SWITCH = msgspec.structs.replace(
    DECISION,
    number=2,
    action=PlanAction.CHANGE_ROLE,
    worker_id=WorkerId("decode-2"),
    role=Role.PREFILL,
    why="prefill is full",
    outcome="decode-2 is prefill after 0.25 s, 3 legs went on",
)
GROWTH = msgspec.structs.replace(DECISION, number=1, action=PlanAction.SCALE, role=Role.DECODE, change=1, why="more")


def drawn(plans: Plans) -> str:
    console = Console(file=io.StringIO(), width=120, no_color=True)
    draw_plans(plans, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_shows_demand_roles_reason_and_changes_with_their_outcome():
    lines = [
        " ".join(line.split()) for line in drawn(Plans(mode="act", decisions=[DECISION, SWITCH, GROWTH])).splitlines()
    ]

    assert any(line.startswith("2.5 requests/s of 900 prompt tokens (300 to compute)") for line in lines)
    assert "prefill 1 2 91%" in lines
    assert "Decision 2 is being carried out." in lines
    assert any(line.endswith("ago decode-2 becomes prefill prefill is full") for line in lines)
    assert "decode-2 is prefill after 0.25 s, 3 legs went on" in lines
    assert any(line.endswith("ago add 1 decode worker more") for line in lines)
    assert "in progress" in lines


def test_an_unknown_itl_is_not_shown_as_zero():
    streamed = msgspec.structs.replace(DECISION, demand=msgspec.structs.replace(DECISION.demand, itl_s_p95=0.02))

    assert "ITL" not in drawn(Plans(mode="act", decisions=[DECISION]))
    assert "ITL p95 20 ms" in " ".join(drawn(Plans(mode="act", decisions=[streamed])).split())


def test_the_text_explains_how_to_turn_the_planner_on():
    assert "ORCHESTRATOR_PLANNER=act" in drawn(Plans(mode="advise", decisions=[DECISION]))
    assert "No changes yet." in drawn(Plans(mode="advise", decisions=[DECISION]))
    assert "ORCHESTRATOR_PLANNER=advise" in drawn(Plans(mode="off"))
