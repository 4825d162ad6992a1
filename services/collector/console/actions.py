"""Orders that an operator gives at the console: to workers, as the command line gives them, and to all routers."""

from __future__ import annotations

from collections.abc import Callable

from services.collector.console.orders import Order, Refusal
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.channels import CHANGE_ROLE, DEFAULT_MODE, DRAIN
from shared.contracts.fleet_orders import ChangeRole, DrainWorker
from shared.contracts.routing import DefaultMode
from shared.text import fleet_text

TAKE_S_MAX = 5.0
"""For a worker to say that it has the order."""
ROLE_S_MAX = 60.0
"""For it to verify another role: longer than all of its attempts."""
AUTO = "auto"

Noted = Callable[[str, str, bool], None]
"""Subject, words, and whether it went well."""


class Actions:
    """Each is done once; what came of it is noted among the events."""

    def __init__(self, bus: Bus, noted: Noted) -> None:
        self._bus = bus
        self._noted = noted

    async def obey(self, order: Order) -> str | Refusal:
        """What was done, in words, or why it was not."""
        if isinstance(order, DefaultMode):
            return await self._change_mode(order)
        try:
            told = await (self._drain(order) if isinstance(order, DrainWorker) else self._change_role(order))
        except NoResponders:
            told = Refusal(status=409, message=f"No worker of the id {order.worker_id} listens.")
        except AskTimedOut:
            told = Refusal(status=503, message=f"{order.worker_id} did not answer in time: see its log.")
        except AskRefused as error:
            told = Refusal(status=409, message=f"{order.worker_id} does not take the order: {error.failure.message}")
        except BusError:
            told = Refusal(status=503, message="NATS cannot be reached just now. Try again shortly.")
        if isinstance(told, Refusal):
            self._noted(order.worker_id, f"an operator's order came to nothing: {told.message}", False)
        return told

    async def _change_mode(self, order: DefaultMode) -> str | Refusal:
        try:
            kept = await self._bus.key_value_store(DEFAULT_MODE, ttl_s=None)
            await kept.put(order)
        except BusError:
            return Refusal(status=503, message="NATS cannot be reached just now. Try again shortly.")
        words = f"requests that ask for no mode are served {order.mode} now"
        if order.mode == AUTO:
            words = "requests that ask for no mode are served as placement finds best"
        self._noted("routers", words, True)
        return f"{words[0].upper()}{words[1:]}."

    async def _drain(self, order: DrainWorker) -> str | Refusal:
        taken = await self._bus.ask(DRAIN, order, timeout_s=TAKE_S_MAX)
        if taken.refusal:
            return Refusal(status=409, message=f"{order.worker_id} does not take the order: {taken.refusal}")
        self._noted(order.worker_id, "an operator told it to drain", True)
        return f"{fleet_text.draining(order.worker_id, None, evacuate=order.evacuate)}."

    async def _change_role(self, order: ChangeRole) -> str | Refusal:
        self._noted(order.worker_id, f"an operator told it to be a {order.role.value} worker", True)
        told = await self._bus.ask(CHANGE_ROLE, order, timeout_s=ROLE_S_MAX)
        if told.failure:
            why = f"{told.worker_id} stays a {told.role.value} worker: {told.failure}"
            return Refusal(status=409, message=why)
        return fleet_text.role_changed(told)
