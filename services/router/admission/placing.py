"""Places one request: the first time through the admission queue, and later attempts at once.

Within the operator's bounds the request also waits while NATS or the fleet behind it cannot be reached (``BusHealth``),
and while its model sleeps: the ``Waker`` has the orchestrator wake it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable
from typing import Final

from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.queues import QueueEntry
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.request.context import RequestContext
from services.router.state.cluster_view import ClusterView
from shared.bus.port import Bus, BusError
from shared.contracts.channels import WAKE_MODEL
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import ModelWaking, WakeModel
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import Clock
from shared.telemetry.span_names import SpanName

ADMISSION: Final = SpanName.ADMISSION
PLACE: Final = SpanName.PLACE

log = logging.getLogger("baton.router")

ASK_S: Final = 2.0
"""Between two asks about one model, however many requests wait for it."""
ANSWER_S_MAX: Final = 2.0
POLL_S: Final = 0.1
SETTLE_S_MAX: Final = 10.0
"""For an adapter to be loaded, and for this router to learn of it, once its model is awake."""
WAITING_MAX: Final = 512
"""Requests that wait for models to wake; each holds its body."""
RETRY_AFTER_S: Final = 5.0
"""When no orchestrator answers, or too many requests wait."""
RETRY_AFTER_S_MAX: Final = 600.0


class Waker:
    """For all requests of one router."""

    def __init__(self, bus: Bus, fleet: Fleet, now: Callable[[], float], *, wake_s_max: float) -> None:
        """``wake_s_max``: longest wait of a request."""
        self._bus = bus
        self._fleet = fleet
        self._now = now
        self._wake_s_max = wake_s_max
        self._asked: dict[str, tuple[float, asyncio.Task[ModelWaking | None]]] = {}
        """By model: the newest ask, and when it was sent."""
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


BUS_UNREACHABLE: Final = Rejection(
    reason=Reason.BUS_DOWN,
    message="NATS, or the fleet behind it, cannot be reached. Try again shortly.",
    retry_after_s=1.0,
)


def lacks_worker(result: Placement | Rejection | None) -> bool:
    """Whether no worker of the model is ready."""
    return isinstance(result, Rejection) and result.reason is Reason.NO_WORKER


class Placing:
    """Places requests, and records how long that takes."""

    def __init__(
        self,
        fleet: Fleet,
        queue: AdmissionQueue,
        bus_health: BusHealth,
        now: Callable[[], float],
        *,
        bus_wait_s_max: float,
        waker: Waker,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._bus_health = bus_health
        self._now = now
        self._bus_wait_s_max = bus_wait_s_max
        self._waker = waker

    def first_now(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection | None:
        """The result if it is there at once; None: ``first`` must follow, which waits for it."""
        if not self._bus_health.reachable:
            return None
        result = self._offer(context, entry)
        return None if lacks_worker(result) else result

    async def first(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection:
        """Wait in the admission queue. A request that is rejected during a bus outage is offered again after it, one
        whose model sleeps once that is awake.
        """
        timings, begun, is_woken = context.timings, self._now(), False
        until = min(begun + self._bus_wait_s_max, context.ends_at)
        while True:
            result: Placement | Rejection | None = None
            if not self._queue.has(entry):
                if not self._bus_health.reachable and not await self._bus_health.wait_reachable(context, until):
                    return BUS_UNREACHABLE
                timings.admission_s += self._now() - begun
                result = self._offer(context, entry)
                begun = self._now()
            if result is None:
                result = await self._queue.wait(entry, context)
                context.mark(ADMISSION, begun, self._now())
            if isinstance(result, Placement):
                timings.admission_s += self._now() - begun
                return result
            if lacks_worker(result) and self._bus_health.reachable and not is_woken:
                woken = await self._waker.wake(context, entry.request.model)
                if woken is True:
                    is_woken = True
                    continue
                result = woken or result
            if self._bus_health.reachable or context.http_request.left:
                timings.admission_s += self._now() - begun
                return result

    def _offer(self, context: RequestContext, entry: QueueEntry) -> Placement | Rejection | None:
        """None: the request waits in the admission queue."""
        begun = self._now()
        result = self._queue.offer(entry)
        self._record(context, begun)
        return result

    def again(self, context: RequestContext, request: PlacementRequest) -> Placement | Rejection:
        """Place a further attempt, which does not wait in the queue again."""
        begun = self._now()
        result = self._fleet.place(request, begun)
        self._record(context, begun)
        return result

    def _record(self, context: RequestContext, begun: float) -> None:
        """Record the time of a placement."""
        ended = self._now()
        context.timings.place_s += ended - begun
        context.mark(PLACE, begun, ended)


RETURN_S_MAX: Final = 2.0
"""Wait after a reconnection for workers to report again; later ones are used once they report."""
CHECK_S_MIN: Final = 0.02
CHECK_S_MAX: Final = 0.25
"""Delay between two checks of one waiting request, doubled each time so that many waiting requests cost little."""


class BusHealth:
    """Whether the router can reach the fleet: NATS itself and, after an outage, each worker.

    A worker that reported before the outage may not have reconnected yet, and a leg sent to it would fail at once.
    After a reconnection the fleet counts as reachable when all workers have reported again, or after ``RETURN_S_MAX``.
    """

    def __init__(self, bus: Bus, cluster: ClusterView, clock: Clock) -> None:
        self._bus = bus
        self._cluster = cluster
        self._now: Callable[[], float] = clock.now
        self._given_up_at = 0.0
        bus.on_disconnect(self._on_disconnect)
        bus.on_reconnect(self._on_reconnect)

    @property
    def reachable(self) -> bool:
        """Whether requests can be placed now."""
        return self._bus.connected and (not self._cluster.away or self._now() >= self._given_up_at)

    async def wait_reachable(self, context: RequestContext, until: float) -> bool:
        """Wait at most ``until``; returns whether the fleet is reachable. False, too, when the client leaves."""
        check_s = CHECK_S_MIN
        while not self.reachable:
            if context.http_request.left or self._now() >= until:
                return False
            await self.pause(context, min(check_s, until - self._now()))
            check_s = min(2 * check_s, CHECK_S_MAX)
        return True

    async def pause(self, context: RequestContext, s: float) -> None:
        """Sleep, at most until the client leaves. Meanwhile only the request's total deadline applies, not a leg's."""
        context.allow(self._now(), context.ends_at)
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        http_request, wake = context.http_request, functools.partial(_wake, left)
        http_request.on_left.append(wake)
        try:
            if not http_request.left:
                await asyncio.wait([left], timeout=s)
        finally:
            http_request.on_left.remove(wake)

    def _on_disconnect(self) -> None:
        self._given_up_at = math.inf  # The connection may be up shortly before the bus reports the reconnection.
        self._cluster.disconnected()

    def _on_reconnect(self) -> None:
        self._given_up_at = self._now() + RETURN_S_MAX


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
