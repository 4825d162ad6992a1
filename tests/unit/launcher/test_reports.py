"""The texts of `baton report` and `baton plan`."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from services.launcher.views.reports import draw_plans, draw_report
from shared.contracts.ids import WorkerId
from shared.contracts.planning import (
    Demand,
    DisaggregationReport,
    PlanAction,
    PlanDecision,
    Plans,
    ReportBucket,
    RoleCount,
)
from shared.contracts.workers import Role

SUMMARY = "Disaggregation pays off: 78% of the requests are served better with separate prefill and decode workers."
NO = ReportBucket(
    model="m",
    tokens_min=1,
    tokens_max=255,
    disaggregated=1256,
    aggregated=120,
    ttft_s=0.045,
    itl_s=0.0088,
    e2e_s=1.7,
    other_ttft_s=0.031,
    other_itl_s=0.0091,
    other_e2e_s=1.69,
    measured=True,
    worth="no",
    reason="about equal, and aggregated serving is simpler",
)
UNSURE = ReportBucket(
    model="a-model-with-a-rather-long-name/as-they-have-them-at-hugging-face-instruct-2507-fp8",
    tokens_min=16384,
    tokens_max=(1 << 31) - 1,
    disaggregated=12,
    ttft_s=2.2,
    itl_s=0.01,
    e2e_s=4.0,
    worth="unsure",
    reason="batch sizes have hardly varied, so the cost of a larger batch is not known",
)


def report_drawn(report: DisaggregationReport, columns: int = 80) -> str:
    out = io.StringIO()
    draw_report(report, Console(file=out, width=columns))
    return out.getvalue()


@pytest.mark.parametrize("columns", [80, 160])
def test_it_compares_both_modes_and_gives_the_reasons(columns: int):
    text = report_drawn(DisaggregationReport(seconds=600, buckets=[NO, UNSURE], summary=SUMMARY), columns)

    assert max(map(len, text.splitlines())) <= columns
    flat = " ".join(text.split())
    assert flat.startswith(SUMMARY)
    for text in ("1 to 255 disaggregated 1,256 45 ms 8.8 ms 1.70 s no", "aggregated, measured 120 31 ms 9.1 ms 1.69 s"):
        assert text in flat
    for text in ("16,384 or more disaggregated 12 2.20 s 10 ms 4.00 s unsure", "aggregated, unknown 0 - - -"):
        assert text in flat
    assert "1 to 255: no, about equal, and aggregated serving is simpler." in flat
    assert "the cost of a larger batch is not known." in flat
    assert "…" not in flat


def test_without_requests_there_is_advice():
    text = report_drawn(DisaggregationReport(seconds=600, summary="No requests were served recently."))

    assert "last 10 minutes. Send some and try again." in " ".join(text.split())


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


def plans_drawn(plans: Plans) -> str:
    console = Console(file=io.StringIO(), width=120, no_color=True)
    draw_plans(plans, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_shows_demand_roles_reason_and_changes_with_their_outcome():
    lines = [
        " ".join(line.split())
        for line in plans_drawn(Plans(mode="act", decisions=[DECISION, SWITCH, GROWTH])).splitlines()
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

    assert "ITL" not in plans_drawn(Plans(mode="act", decisions=[DECISION]))
    assert "ITL p95 20 ms" in " ".join(plans_drawn(Plans(mode="act", decisions=[streamed])).split())


def test_the_text_explains_how_to_turn_the_planner_on():
    assert "ORCHESTRATOR_PLANNER=act" in plans_drawn(Plans(mode="advise", decisions=[DECISION]))
    assert "No changes yet." in plans_drawn(Plans(mode="advise", decisions=[DECISION]))
    assert "ORCHESTRATOR_PLANNER=advise" in plans_drawn(Plans(mode="off"))
