"""Carries out the sleeper's decisions while this orchestrator leads, and answers routers and operators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.orchestrator.sleeper import Order, Sleeper, SleepPolicy
from shared.bus.port import Bus, BusError, Envelope, Subscription
from shared.contracts.channels import ORDER_MODEL, REQUESTS_FINISHED, SLEEP, WAKE, WAKE_MODEL
from shared.contracts.fleet_orders import ModelOrdered, ModelWaking, OrderModel, SleepWorker, WakeModel, WakeWorker
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestsFinished
from shared.contracts.workers import FleetWorker
from shared.runtime.clock import Clock

TICK_S = 0.5
ORDER_S_MAX = 3.0
"""For a worker to accept an order."""

log = logging.getLogger(__name__)


class Sleeping:
    """Puts models to sleep and wakes them."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        policy: SleepPolicy,
        *,
        leading: Callable[[], bool],
        fleet: Callable[[], list[FleetWorker]],
    ) -> None:
        """``leading``: whether this orchestrator is the leader now."""
        self._fleet = fleet
        self._bus = bus
        self._clock = clock
        self._leading = leading
        self._sleeper = Sleeper(policy)
        self._subscriptions: list[Subscription] = []
        """Held while leading."""
        self._changed = asyncio.Event()

    async def listen(self) -> None:
        """Subscribe to finished requests."""
        await self._bus.subscribe(REQUESTS_FINISHED, self._requests_finished)

    def _requests_finished(self, message: RequestsFinished, _envelope: Envelope) -> None:
        now = self._clock.now()
        for request in message.requests:
            if worker_id := request.decode_worker or request.prefill_worker:
                self._sleeper.used(WorkerId(worker_id), now)

    async def run(self) -> None:
        """Follow the fleet and give orders, until cancelled."""
        async with asyncio.TaskGroup() as orders:
            while True:
                self._update()
                try:
                    await self._lead(orders) if self._leading() else await self._stand_by()
                except BusError as error:
                    log.warning("cannot manage sleeping models, trying again: %s", error)
                self._changed.clear()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    def _update(self) -> None:
        self._sleeper.update(self._fleet(), self._clock.now())

    async def _lead(self, orders: asyncio.TaskGroup) -> None:
        if not self._subscriptions:
            self._subscriptions = [
                await self._bus.answer(WAKE_MODEL, self._wake_model),
                await self._bus.answer(ORDER_MODEL, self._order_model),
            ]
        for order in self._sleeper.orders(self._clock.now()):
            orders.create_task(self._carry_out(order), name=f"order-{order.worker_id}")

    async def _stand_by(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for each in subscriptions:
            await each.close()

    async def _wake_model(self, ask: WakeModel, _envelope: Envelope) -> ModelWaking:
        self._update()
        answer = self._sleeper.want(ask.model, self._clock.now())
        self._changed.set()
        return answer

    async def _order_model(self, order: OrderModel, _envelope: Envelope) -> ModelOrdered:
        self._update()
        answer = self._sleeper.order(order.model, self._clock.now(), asleep=order.asleep)
        log.info(
            "ordered: %s %s%s",
            "sleep" if order.asleep else "wake",
            order.model,
            f": {answer.refusal}" * bool(answer.refusal),
        )
        self._changed.set()
        return answer

    async def _carry_out(self, order: Order) -> None:
        """A worker that does not follow gets the order again."""
        worker_id = order.worker_id
        try:
            if order.asleep:
                taken = await self._bus.ask(SLEEP, SleepWorker(worker_id=worker_id), timeout_s=ORDER_S_MAX)
            else:
                taken = await self._bus.ask(WAKE, WakeWorker(worker_id=worker_id), timeout_s=ORDER_S_MAX)
        except BusError as error:
            log.warning("%s did not accept the order: %s", worker_id, error or type(error).__name__)
            return
        verb = "sleeps" if order.asleep else "wakes"
        log.info("%s %s%s", worker_id, "refuses: " if taken.refusal else verb, taken.refusal)
