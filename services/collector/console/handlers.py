"""What the console asks of the system over NATS: a router's decision, orders to workers, the default mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.collector.console.orders import Order, Refusal
from services.collector.console.requests import RecentRequests, detail_of
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.adapters import OrderAdapter
from shared.contracts.channels import CHANGE_ROLE, DECISION, DEFAULT_MODE, DRAIN, ORDER_ADAPTER
from shared.contracts.control import DefaultMode
from shared.contracts.decisions import AskDecision
from shared.contracts.fleet_orders import ChangeRole, DrainWorker
from shared.contracts.ids import DecisionId, router_of
from shared.text import fleet_text
from shared.text.decision_texts import NO_DECISION_ID, not_kept, router_away

DECISION_S_MAX = 3.0
ACCEPT_S_MAX = 5.0
"""For a worker to accept an order."""
ROLE_S_MAX = 60.0
"""For a worker to verify another role: longer than all of its attempts."""
ADAPTER_S_MAX = 600.0
"""For all workers to load an adapter."""
AUTO = "auto"
NATS_DOWN = Refusal(status=503, message="The collector cannot reach NATS. Try again shortly.")
NOT_STORED = Refusal(
    status=503,
    message="NATS did not store the default mode. If its disk was full, restart it once there is space again.",
)

OnOrder = Callable[[str, str, bool], None]
"""Subject, text, and whether the order succeeded."""


async def find_decision(bus: Bus, recent: RecentRequests, decision_id: str) -> dict[str, Any] | Refusal:
    """The decision and its request; a refusal says why there is none."""
    router_id = router_of(decision_id)
    if not router_id:
        return Refusal(status=404, message=NO_DECISION_ID)
    ask = AskDecision(router_id=router_id, decision_id=DecisionId(decision_id))
    try:
        decision = (await bus.ask(DECISION, ask, timeout_s=DECISION_S_MAX)).decision
    except (NoResponders, AskTimedOut, AskRefused):
        return Refusal(status=404, message=router_away(router_id))
    except BusError:
        return NATS_DOWN
    if decision is None:
        return Refusal(status=404, message=not_kept(router_id))
    return detail_of(recent.find(decision_id), decision)


class OrderHandler:
    """Executes each order once and reports the outcome as an event."""

    def __init__(self, bus: Bus, on_order: OnOrder) -> None:
        self._bus = bus
        self._on_order = on_order

    async def execute(self, order: Order) -> str | Refusal:
        """A sentence that says what was done, or why it was not."""
        if isinstance(order, DefaultMode):
            return await self._set_mode(order)
        if isinstance(order, OrderAdapter):
            return await self._change_adapter(order)
        try:
            result = await (self._drain(order) if isinstance(order, DrainWorker) else self._change_role(order))
        except NoResponders:
            result = Refusal(status=409, message=f"No worker with the id {order.worker_id} is running.")
        except AskTimedOut:
            result = Refusal(status=503, message=f"{order.worker_id} did not respond in time: see its log.")
        except AskRefused as error:
            result = Refusal(status=409, message=f"{order.worker_id} refused the order: {error.failure.message}")
        except BusError:
            result = NATS_DOWN
        if isinstance(result, Refusal):
            self._on_order(order.worker_id, f"an operator's order failed: {result.message}", False)
        return result

    async def _set_mode(self, order: DefaultMode) -> str | Refusal:
        try:
            store = await self._bus.key_value_store(DEFAULT_MODE)
            await store.put(order)
        except BusError:
            return NOT_STORED if self._bus.connected else NATS_DOWN
        text = f"the default mode is {order.mode} now"
        if order.mode == AUTO:
            text = "the default mode is auto now: placement chooses the mode of each request"
        self._on_order("routers", text, True)
        return f"{text[0].upper()}{text[1:]}."

    async def _change_adapter(self, order: OrderAdapter) -> str | Refusal:
        """The orchestrator publishes the result, which becomes the event."""
        try:
            result = await self._bus.ask(ORDER_ADAPTER, order, timeout_s=ADAPTER_S_MAX)
        except NoResponders:
            return Refusal(status=503, message="No orchestrator responds: it carries out orders about adapters.")
        except (AskTimedOut, AskRefused):
            return Refusal(status=503, message="The orchestrator did not carry out the order in time: see its log.")
        except BusError:
            return NATS_DOWN
        failed = [change for change in result.changes if change.failure]
        if result.refusal or failed:
            return Refusal(status=409, message=fleet_text.adapter_ordered(result))
        return f"{fleet_text.adapter_ordered(result)}."

    async def _drain(self, order: DrainWorker) -> str | Refusal:
        accepted = await self._bus.ask(DRAIN, order, timeout_s=ACCEPT_S_MAX)
        if accepted.refusal:
            return Refusal(status=409, message=f"{order.worker_id} refused the order: {accepted.refusal}")
        self._on_order(order.worker_id, "an operator ordered it to drain", True)
        return f"{fleet_text.draining(order.worker_id, None, evacuate=order.evacuate)}."

    async def _change_role(self, order: ChangeRole) -> str | Refusal:
        self._on_order(order.worker_id, f"an operator ordered it to become a {order.role.value} worker", True)
        changed = await self._bus.ask(CHANGE_ROLE, order, timeout_s=ROLE_S_MAX)
        if changed.failure:
            why = f"{changed.worker_id} remains a {changed.role.value} worker: {changed.failure}"
            return Refusal(status=409, message=why)
        return fleet_text.role_changed(changed)
