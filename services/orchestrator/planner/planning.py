"""Runs the planner: it always follows the fleet; while this orchestrator leads, it plans, publishes, and asks a scaler
for workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.planner.planner import Planner
from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.scalers import make_scaler
from services.orchestrator.settings import Settings
from shared.bounded import Bounded
from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError, Envelope, Subscription
from shared.contracts.channels import CHANGE_ROLE, PLAN, PLANS, REQUESTS_FINISHED
from shared.contracts.fleet_orders import ChangeRole
from shared.contracts.inference import RequestsFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import AskPlans, PlanAction, PlanDecision, Plans, ScaleFleet
from shared.contracts.workers import FleetWorker
from shared.runtime.clock import Clock
from shared.text.fleet_text import plan_text

ROLE_CHANGE_S_MAX = 60.0

log = logging.getLogger(__name__)

SAID_S = 3600.0
"""Time after which a change that is refused again for the same reason is logged again."""
CHANGES_SAID_MAX = 256


@dataclass(frozen=True, slots=True)
class InVain:
    """The outcome of a change that was not made, and when it was logged."""

    outcome: str
    at: float


NEVER = InVain("", -math.inf)


class Planning:
    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: Settings,
        rules: Rules,
        *,
        leading: Callable[[], bool],
        fleet: Callable[[], list[FleetWorker]],
    ) -> None:
        """``leading``: whether this orchestrator is the leader now. Raises ValueError for settings of no scaler."""
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._leading = leading
        self._fleet = fleet
        self._rules = rules
        self._planner = Planner(rules, clock.now())
        self._scaler = make_scaler(bus, settings, fleet)
        self._in_vain = Bounded[tuple[str, str, str], InVain](CHANGES_SAID_MAX)
        """Changes by model, fingerprint and text that were refused, or are advice: the planner asks for them again."""
        self._subscription: Subscription | None = None
        """Held while leading."""

    async def listen(self) -> None:
        """Subscribe to finished requests."""
        await self._bus.subscribe(REQUESTS_FINISHED, self._requests_finished)

    def reported(self, load: LoadReport) -> None:
        self._planner.reported(load, self._clock.now())

    def _requests_finished(self, message: RequestsFinished, _envelope: Envelope) -> None:
        now = self._clock.now()
        for request in message.requests:
            self._planner.ended(request, now)

    async def run(self) -> None:
        """Sample the fleet and plan periodically, until cancelled."""
        outage = Outage(log)
        async with asyncio.TaskGroup() as changes:
            while True:
                workers = self._fleet()
                try:
                    if self._leading():
                        await self._lead(workers, changes)
                    else:
                        await self._stand_by(workers)
                    outage.over()
                except BusError as error:
                    outage.failed("cannot publish the plan", error)
                await asyncio.sleep(self._rules.sample_s)

    async def _lead(self, workers: list[FleetWorker], changes: asyncio.TaskGroup) -> None:
        now = self._clock.now()
        if self._subscription is None:
            self._planner.leads(now)
            self._subscription = await self._bus.answer(PLANS, self._answer)
        if self._settings.planner == "off":
            return
        for decision in self._planner.plan(workers, now, self._clock.wall_ms()):
            if decision.action is not PlanAction.NOTHING:
                changes.create_task(self._carry_out(decision), name=f"plan-{decision.number}")
            await self._bus.publish(PLAN, decision)

    async def _stand_by(self, workers: list[FleetWorker]) -> None:
        """A standby follows the fleet as well, so that it knows it when it takes over."""
        self._planner.update(workers, self._clock.now())
        if self._subscription is not None:
            answering, self._subscription = self._subscription, None
            await answering.close()

    async def _answer(self, ask: AskPlans, _envelope: Envelope) -> Plans:
        return Plans(mode=self._settings.planner, decisions=self._planner.log.newest(ask.count_max))

    async def _carry_out(self, decision: PlanDecision) -> None:
        """Carry the decision out, unless the planner only advises, and publish the outcome."""
        change = (decision.model, decision.fingerprint, plan_text(decision))
        before = self._in_vain.get(change, NEVER)
        if is_new := before.at + SAID_S <= self._clock.now():
            log.info("plan %d: %s, because %s", decision.number, plan_text(decision), decision.why)
        if self._settings.planner == "advise":
            done, updated = False, self._planner.advised(decision, self._clock.now())
        else:
            done, outcome = await self._change(decision)
            if is_new or outcome != before.outcome:
                log.info("plan %d: %s: %s", decision.number, plan_text(decision), outcome)
                is_new = True
            updated = self._planner.set_outcome(decision, done=done, outcome=outcome, now=self._clock.now())
        if done:
            self._in_vain.pop(change, None)
        elif is_new:
            self._in_vain.pop(change, None)
            self._in_vain[change] = InVain(updated.outcome, self._clock.now())
        try:
            await self._bus.publish(PLAN, updated)
        except BusError as error:
            log.warning("cannot publish the plan's outcome: %s", error)

    async def _change(self, decision: PlanDecision) -> tuple[bool, str]:
        """Whether the change was made, and its outcome as text."""
        if not self._leading():
            return False, "no longer leading"
        if decision.action is PlanAction.CHANGE_ROLE:
            return await self._change_role(decision)
        assert decision.role is not None
        order = ScaleFleet(
            model=decision.model,
            revision=decision.revision,
            role=decision.role,
            change=decision.change,
            why=decision.why,
        )
        scaled = await self._scaler.scale(order)
        if not scaled.change:
            return False, scaled.refusal or "refused"
        begun = f"{scaled.change:+d} {decision.role} begun"
        return True, f"{begun}: {scaled.refusal}" if scaled.refusal else begun

    async def _change_role(self, decision: PlanDecision) -> tuple[bool, str]:
        assert decision.role is not None
        order = ChangeRole(worker_id=decision.worker_id, role=decision.role)
        try:
            changed = await self._bus.ask(CHANGE_ROLE, order, timeout_s=ROLE_CHANGE_S_MAX)
        except BusError as error:
            return False, f"{decision.worker_id} does not reply: {error or type(error).__name__}"
        if changed.failure or changed.role is not decision.role:
            return False, f"{decision.worker_id} stays {changed.role}: {changed.failure}"
        return (
            True,
            f"{decision.worker_id} is {changed.role} after {changed.seconds:.2f} s, {changed.legs} legs went on",
        )
