"""Runs the planner: it always follows the fleet; while this orchestrator leads, it plans, publishes, and asks a scaler
for workers: the launcher of this machine, a webhook, or none.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httpx
import msgspec

from services.orchestrator.planner.planner import Planner
from services.orchestrator.planner.rules import Rules
from services.orchestrator.settings import Settings
from shared.bounded import Bounded
from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError, Envelope, NoResponders, Subscription
from shared.contracts.channels import CHANGE_ROLE, PLAN, PLANS, REQUESTS_FINISHED, SCALE
from shared.contracts.fleet_orders import ChangeRole
from shared.contracts.inference import RequestsFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import AskPlans, FleetScaled, PlanAction, PlanDecision, Plans, ScaleFleet
from shared.contracts.workers import FleetWorker
from shared.runtime.clock import Clock
from shared.text.fleet_text import plan_text

ROLE_CHANGE_S_MAX = 60.0
SCALER_S_MAX = 10.0
"""Time limit for the scaler's reply."""

log = logging.getLogger(__name__)
REFUSAL_CHARS_MAX = 200
"""Length of the part of a webhook's reply that a refusal quotes."""


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
        self, bus: Bus, clock: Clock, settings: Settings, rules: Rules, *, leading: Callable[[], bool]
    ) -> None:
        """``leading``: whether this orchestrator is the leader now."""
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._leading = leading
        self._rules = rules
        self._planner = Planner(rules, clock.now())
        self._scaler = make_scaler(bus, settings)
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

    async def run(self, fleet: Callable[[], list[FleetWorker]]) -> None:
        """Sample the fleet and plan periodically, until cancelled."""
        outage = Outage(log)
        async with asyncio.TaskGroup() as changes:
            while True:
                workers = fleet()
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


def make_scaler(bus: Bus, settings: Settings) -> Scaler:
    url = settings.scaler_url
    return WebhookScaler(url, SCALER_S_MAX) if url else LauncherScaler(bus, SCALER_S_MAX)


class Scaler(Protocol):
    """Starts and stops workers. A refusal is returned as text, never raised."""

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        """Begin to start or stop workers; returns what was begun."""


class LauncherScaler:
    """Asks ``baton up --workers-max``, over the bus."""

    def __init__(self, bus: Bus, reply_s_max: float) -> None:
        self._bus = bus
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        try:
            return await self._bus.ask(SCALE, order, timeout_s=self._reply_s_max)
        except NoResponders:
            return FleetScaled(refusal="no launcher scales: start one with `baton up --workers-max N`")
        except BusError as error:
            return FleetScaled(refusal=f"the launcher did not reply: {error or type(error).__name__}")


class WebhookScaler:
    """Posts the order as JSON. An empty reply means that it is carried out; any other is a ``FleetScaled``."""

    def __init__(self, url: str, reply_s_max: float) -> None:
        self._url = url
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        try:
            async with httpx.AsyncClient(timeout=self._reply_s_max, trust_env=False) as client:
                reply = await client.post(
                    self._url, content=msgspec.json.encode(order), headers={"content-type": "application/json"}
                )
            return self._read(reply, order)
        except httpx.HTTPError as error:
            return FleetScaled(refusal=f"{self._url} cannot be reached: {error or type(error).__name__}")
        except msgspec.DecodeError as error:
            return FleetScaled(refusal=f"{self._url} replies with what is no FleetScaled: {error}")

    def _read(self, reply: httpx.Response, order: ScaleFleet) -> FleetScaled:
        """Raises msgspec.DecodeError."""
        if not reply.is_success:
            text = reply.text[:REFUSAL_CHARS_MAX]
            return FleetScaled(refusal=f"{self._url} replies {reply.status_code}: {text}".rstrip(": "))
        if not reply.content.strip():
            return FleetScaled(change=order.change)
        return msgspec.json.decode(reply.content, type=FleetScaled)
