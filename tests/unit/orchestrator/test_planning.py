"""The planner's shell in virtual time: when it may act, what it publishes, and which scaler it asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest

from services.orchestrator.planner.planning import SAID_S
from services.orchestrator.planner.rules import Rules
from services.orchestrator.service import Orchestrator, check
from services.orchestrator.settings import Settings
from shared.bus.port import NoResponders
from shared.contracts.channels import PLAN, PLANS, SCALE
from shared.contracts.planning import AskPlans, FleetScaled, PlanAction, PlanDecision, Plans, ScaleFleet
from shared.contracts.workers import Role
from shared.runtime.settings import SettingsError, load
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.planned_workers import PlannedWorker, planned_fleet
from tests.support.virtual_time import LoopClock, in_virtual_time

PLANNER_LOG = "services.orchestrator.planner.planning"
RULES = Rules(lasting_s=10.0, spare_s=20.0, cool_down_s=30.0)


@dataclass
class Heard:
    """A fleet with orchestrators, and all that was said of plans."""

    hub: MemoryHub = field(default_factory=MemoryHub)
    told: list[PlanDecision] = field(default_factory=list)
    wishes: list[ScaleFleet] = field(default_factory=list)
    workers: dict[str, PlannedWorker] = field(default_factory=dict)
    buses: dict[str, MemoryBus] = field(default_factory=dict)
    """Of the orchestrators."""

    @property
    def changes(self) -> list[PlanDecision]:
        return [each for each in self.told if each.action is not PlanAction.NOTHING]

    async def plans(self) -> Plans:
        return await MemoryBus(self.hub).ask(PLANS, AskPlans(), timeout_s=1.0)


@asynccontextmanager
async def orchestrators(
    *names: str, refuses: str = "", rules: Rules = RULES, planner: Literal["off", "advise", "act"] = "act"
) -> AsyncIterator[Heard]:
    heard = Heard()
    ear = MemoryBus(heard.hub)
    await ear.subscribe(PLAN, lambda decision, _envelope: heard.told.append(decision))
    ends = []
    fleet = planned_fleet(lambda: MemoryBus(heard.hub), refuses=refuses)
    async with fleet as heard.workers, asyncio.TaskGroup() as lives:
        for name in names:
            end = asyncio.Event()
            bus = heard.buses[name] = MemoryBus(heard.hub)
            one = Orchestrator(bus, LoopClock(), name, Settings(planner=planner), rules)
            lives.create_task(one.run(end, lambda: None))
            ends.append(end)
            await asyncio.sleep(0.1)
        yield heard
        for end in ends:
            end.set()


@in_virtual_time
async def test_only_the_leader_orders_and_each_change_is_published_with_its_outcome():
    async with orchestrators("o1", "o2") as heard:
        await asyncio.sleep(45.0)

        assert heard.workers["d1"].orders == [Role.PREFILL]
        assert [each.outcome for each in heard.changes[:2]] == ["", "d1 is prefill after 0.25 s, 3 legs went on"]
        assert [each.number for each in heard.changes[:2]] == [heard.changes[0].number] * 2


@in_virtual_time
async def test_a_new_leader_orders_nothing_before_its_predecessors_change_has_shown():
    async with orchestrators("o1", "o2") as heard:
        await asyncio.sleep(20.0)
        heard.buses["o1"].lose()
        await asyncio.sleep(5.0 + RULES.cool_down_s)

        assert heard.workers["d1"].orders == []
        assert (await heard.plans()).decisions
        await asyncio.sleep(15.0)
        assert heard.workers["d1"].orders == [Role.PREFILL]


@in_virtual_time
async def test_advice_is_published_without_action():
    async with orchestrators("o1", planner="advise") as heard:
        await asyncio.sleep(45.0)

        assert [each.outcome for each in heard.changes] == ["", "advice only"]
        assert all(worker.orders == [] for worker in heard.workers.values())
        assert (await heard.plans()).mode == "advise"


@in_virtual_time
async def test_a_planner_that_is_off_reports_that_and_computes_nothing():
    async with orchestrators("o1", planner="off") as heard:
        await asyncio.sleep(45.0)

        assert heard.told == []
        assert await heard.plans() == Plans(mode="off", decisions=[])


@in_virtual_time
async def test_without_a_leader_no_orchestrator_answers_for_the_plan():
    async with orchestrators() as heard:
        with pytest.raises(NoResponders):
            await heard.plans()


@in_virtual_time
async def test_a_refused_role_change_is_published_with_its_reason():
    async with orchestrators("o1", refuses="the KV self-test failed") as heard:
        await asyncio.sleep(95.0)

        assert [each.outcome for each in heard.changes if each.outcome][:2] == [
            "d1 stays decode: the KV self-test failed",
            "d2 stays decode: the KV self-test failed",
        ]
        assert len(heard.workers["d1"].orders) == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (FleetScaled(change=2), "+2 prefill begun"),
        (FleetScaled(change=1, refusal="there is one GPU left"), "+1 prefill begun: there is one GPU left"),
        (FleetScaled(refusal="no GPU is left"), "no GPU is left"),
        (None, "no launcher scales: start one with `baton up --workers-max N`"),
    ],
)
@in_virtual_time
async def test_without_a_spare_worker_the_launcher_gets_a_request(answer: FleetScaled | None, outcome: str):
    async with orchestrators("o1", rules=msgspec.structs.replace(RULES, decode_min=3, step_max=2)) as heard:

        async def scale(wish: ScaleFleet, _envelope: object) -> FleetScaled:
            heard.wishes.append(wish)
            assert answer is not None
            return answer

        if answer is not None:
            await MemoryBus(heard.hub).answer(SCALE, scale)
        await asyncio.sleep(45.0)

        assert heard.changes[1].outcome == outcome
        if answer is not None:
            wish = heard.wishes[0]
            assert (wish.model, wish.revision, wish.role, wish.change) == ("m", "r", Role.PREFILL, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("planner", "lines"), [("act", 2), ("advise", 1)])
@in_virtual_time
async def test_a_change_that_is_refused_again_for_the_same_reason_is_logged_once(caplog, planner, lines):
    caplog.set_level(logging.INFO, logger=PLANNER_LOG)
    rules = msgspec.structs.replace(RULES, decode_min=3, step_max=2, refused_s=30.0)
    async with orchestrators("o1", rules=rules, planner=planner) as heard:
        await asyncio.sleep(300.0)

        outcomes = [each.outcome for each in heard.changes if each.outcome]
        assert len(outcomes) >= 3
        assert len(set(outcomes)) == 1
        assert len([each for each in caplog.records if each.name == PLANNER_LOG]) == lines

        await asyncio.sleep(SAID_S)
        assert len([each for each in caplog.records if each.name == PLANNER_LOG]) == 2 * lines


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"PLANNER_MODELS": '{"*": {"workers_min": 3, "workers_max": 2}}'}, r"\* has workers_min 3, workers_max 2"),
        ({"PLANNER_TIME_SCALE": "0"}, "ORCHESTRATOR_PLANNER_TIME_SCALE"),
        ({"PLANNER_MODELS": '{"m": {"workers_min": 0}}'}, "ORCHESTRATOR_PLANNER_MODELS"),
        ({"PLANNER": "yes"}, "ORCHESTRATOR_PLANNER"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(variables: dict[str, str], text: str):
    with pytest.raises(SettingsError, match=text):
        check(load(Settings, "ORCHESTRATOR_", {f"ORCHESTRATOR_{name}": value for name, value in variables.items()}))


def test_settings_become_the_planners_rules():
    models = '{"*": {"workers_min": 2, "workers_max": 9}, "m": {"ttft_s": 3}}'
    variables = {"TTFT_S": "1.5", "ITL_S": "0.1", "MODELS": models, "TIME_SCALE": "0.5"}
    named = {f"ORCHESTRATOR_PLANNER_{name}": value for name, value in variables.items()}
    rules = Rules.from_settings(load(Settings, "ORCHESTRATOR_", named))
    own = rules.of("m")

    assert (rules.ttft_s, rules.itl_s, rules.workers_min, rules.workers_max) == (1.5, 0.1, 2, 9)
    assert (own.ttft_s, own.itl_s, own.workers_min, own.workers_max) == (3.0, 0.1, 2, 9)
    assert (rules.hold_s, rules.load_max) == (0.5 * Rules().hold_s, Rules().load_max)
