"""An orchestrator process that plans, on a real NATS server, with workers that only publish messages."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.nats_bus import connect_nats
from shared.contracts.channels import PLAN, PLANS
from shared.contracts.planning import AskPlans, PlanAction, PlanDecision
from shared.contracts.workers import Role
from tests.support.planned_workers import planned_fleet
from tests.support.processes import service_process

pytestmark = pytest.mark.nats

WAIT_S_MAX = 60.0
TIME_SCALE = "0.05"


async def test_a_spare_worker_changes_its_role_and_the_plan_has_the_outcome(nats_server, tmp_path):
    bus = await connect_nats(nats_server.url, name="test")
    changed: asyncio.Future[PlanDecision] = asyncio.get_running_loop().create_future()

    def hear(decision: PlanDecision, _envelope) -> None:
        if decision.action is PlanAction.CHANGE_ROLE and decision.outcome and not changed.done():
            changed.set_result(decision)

    await bus.subscribe(PLAN, hear)
    settings = {"ORCHESTRATOR_PLANNER": "act", "BATON_NATS_URL": nats_server.url}
    settings["ORCHESTRATOR_PLANNER_TIME_SCALE"] = TIME_SCALE
    with service_process("orchestrator", tmp_path, **settings):
        async with planned_fleet(lambda: bus) as workers:
            decision = await asyncio.wait_for(changed, WAIT_S_MAX)
            told = await bus.ask(PLANS, AskPlans(), timeout_s=WAIT_S_MAX)

    assert (decision.worker_id, decision.role) == ("d1", Role.PREFILL)
    assert decision.outcome == "d1 is prefill after 0.25 s, 3 legs went on"
    assert workers["d1"].orders == [Role.PREFILL]
    assert told.mode == "act"
    assert decision in told.decisions
    await bus.close()
