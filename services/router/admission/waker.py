"""Wakes the model of a request when its workers sleep: asks the orchestrator, which knows the operator's bounds.

The request waits meanwhile, up to ``ROUTER_WAKE_S_MAX``. The order to the workers is the orchestrator's
(``services/orchestrator/sleeping.py``), and each worker carries it out (``services/worker/lifecycle/sleeping.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final

from services.router.placement.fleet import Fleet
from services.router.placement.placement import Rejection
from services.router.request.context import RequestContext
from shared.bus.port import Bus, BusError
from shared.contracts.channels import WAKE_MODEL
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import ModelWaking, WakeModel
from shared.contracts.workers import WorkerPhase

log = logging.getLogger("baton.router")

ASK_S: Final = 2.0
"""Time between two asks about one model, however many requests wait for it."""
ANSWER_S_MAX: Final = 2.0
POLL_S: Final = 0.1
SETTLE_S_MAX: Final = 10.0
"""Time for an adapter to be loaded, and for this router to learn of it, once its model is awake."""
WAITING_MAX: Final = 512
"""Requests that wait for models to wake; each holds its body."""
RETRY_AFTER_S: Final = 5.0
"""Retry-After when no orchestrator answers, or too many requests wait."""
RETRY_AFTER_S_MAX: Final = 600.0


class Waker:
    """Wakes models for all requests of one router."""

    def __init__(self, bus: Bus, fleet: Fleet, now: Callable[[], float], *, wake_s_max: float) -> None:
        """``wake_s_max``: longest wait of a request."""
        self._bus = bus
        self._fleet = fleet
        self._now = now
        self._wake_s_max = wake_s_max
        self._asked: dict[str, tuple[float, asyncio.Task[ModelWaking | None]]] = {}
        """The newest ask by model, and when it was sent."""
        self._waiting = 0

    async def wake(self, context: RequestContext, model: str) -> Rejection | bool:
        """True once a worker of the model, or with the adapter, is ready; False if the model does not sleep; else why
        the request does not wait.
        """
        base = self._fleet.cluster.model_of(model)
        if not base or self._is_ready(model):
            return False
        if self._waiting >= WAITING_MAX:
            return asleep(model, "too many requests wait for models to wake", RETRY_AFTER_S)
        self._waiting += 1
        try:
            until = min(self._now() + self._wake_s_max, context.ends_at)
            return await self._until_ready(context, model, base, until)
        finally:
            self._waiting -= 1

    async def _until_ready(self, context: RequestContext, model: str, base: str, until: float) -> Rejection | bool:
        """``base``: the model itself, or that of the adapter."""
        slept_at = -math.inf
        while not self._is_ready(model):
            if context.http_request.left:
                return False
            answer = await self._ask(base)
            if answer is None:
                return self._sleeps(base) and asleep(model, "no orchestrator is there to wake it", RETRY_AFTER_S)
            if answer.asleep:
                slept_at = self._now()
            elif self._now() - slept_at > SETTLE_S_MAX:
                return self._is_ready(model)
            if answer.refusal:
                return asleep(model, answer.refusal, answer.retry_after_s)
            left_s = until - self._now()
            if left_s <= 0.0 or answer.expected_s > left_s:
                return asleep(model, "it wakes up now", max(answer.expected_s, 1.0))
            await asyncio.sleep(min(POLL_S, left_s))
        return True

    async def _ask(self, model: str) -> ModelWaking | None:
        """The orchestrator's newest answer; None without one. Requests for one model share it."""
        now = self._now()
        at, asking = self._asked.get(model, (-math.inf, None))
        if asking is None or now - at >= ASK_S:
            self._asked = {name: ask for name, ask in self._asked.items() if now - ask[0] < ASK_S}
            asking = asyncio.create_task(self._ask_orchestrator(model), name="wake-model")
            self._asked[model] = (now, asking)
        return await asyncio.shield(asking)

    async def _ask_orchestrator(self, model: str) -> ModelWaking | None:
        try:
            return await self._bus.ask(WAKE_MODEL, WakeModel(model=model), timeout_s=ANSWER_S_MAX)
        except BusError as error:
            log.warning("no orchestrator wakes %s: %s", model, error or type(error).__name__)
            return None

    def _sleeps(self, model: str) -> bool:
        """Whether a worker says so. While it falls asleep it may not be registered: the orchestrator knows better."""
        return any(view.record.phase is WorkerPhase.ASLEEP for view in self._fleet.cluster.offering(model))

    def _is_ready(self, model: str) -> bool:
        now, silent_s_max = self._now(), self._fleet.policy.silent_s_max
        return any(view.fit(now, silent_s_max) for view in self._fleet.cluster.offering(model))


def asleep(model: str, why: str, retry_after_s: float) -> Rejection:
    """The model sleeps, and the request cannot wait for it."""
    message = f"The model `{model}` is asleep: {why}. Try again after the time in Retry-After."
    after_s = min(max(math.ceil(retry_after_s), 1.0), RETRY_AFTER_S_MAX)
    return Rejection(reason=Reason.MODEL_ASLEEP, message=message, retry_after_s=after_s)
