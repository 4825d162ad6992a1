"""Which models sleep and which are awake: by their idle time, the requests that wait, and the operator's bounds.

The leading orchestrator carries the decisions out, and answers routers and operators.

A model sleeps when all its workers do. Times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from services.orchestrator.settings import Settings
from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError, Envelope, Subscription
from shared.contracts.channels import ORDER_MODEL, REQUESTS_FINISHED, SLEEP, WAKE, WAKE_MODEL
from shared.contracts.fleet_orders import ModelOrdered, ModelWaking, OrderModel, SleepWorker, WakeModel, WakeWorker
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestsFinished
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from shared.runtime.clock import Clock

WANT_S = 10.0
"""A model is wanted for so long after a request for it was last reported to wait."""
AWAKE_S_MIN = 30.0
"""A model that was just used does not make room for another one: two models in turn would only load weights."""
WAKE_S_ASSUMED = 30.0
"""To wake a model, before it was measured."""
WAKE_S_LEAST = 1.0
REPEAT_S = 5.0
"""An order that a worker has not followed is sent again after this time."""
FALL_ASLEEP_S_MAX = 120.0
"""Time limit from the order to sleep until a worker registers as asleep: running legs may finish."""
MODELS_MAX = 256
OVER = (WorkerPhase.LOST, WorkerPhase.GONE)


class SleepPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's bounds."""

    after_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Models that sleep after so long without a request."""
    awake_max: int = 0
    """Models that may be awake at a time; 0: all. Beyond it, the one that was unused longest makes room."""
    on_request: bool = True
    """Whether a request may wake a model."""

    @classmethod
    def from_settings(cls, settings: Settings) -> SleepPolicy:
        """Raises ValueError with a message for the operator."""
        try:
            after_s = msgspec.json.decode(settings.sleep_after_s.strip().encode() or b"{}", type=dict[str, float])
        except msgspec.DecodeError as error:
            raise ValueError(f"ORCHESTRATOR_SLEEP_AFTER_S: {error}") from error
        if len(after_s) > MODELS_MAX:
            raise ValueError(f"ORCHESTRATOR_SLEEP_AFTER_S: {len(after_s)} models; at most {MODELS_MAX} can be named")
        for model, seconds in after_s.items():
            if not model or not 0.0 < seconds < math.inf:
                raise ValueError(
                    f"ORCHESTRATOR_SLEEP_AFTER_S: {model!r}: {seconds}; it is a model and a number of seconds above 0"
                )
        return cls(after_s=after_s, awake_max=settings.awake_max, on_request=settings.wake_on_request)


@dataclass(frozen=True, slots=True)
class Order:
    """For one worker."""

    worker_id: WorkerId
    asleep: bool


@dataclass(slots=True)
class Model:
    used_at: float
    workers: list[FleetWorker] = field(default_factory=list)
    wanted_until: float = -math.inf
    rests: bool = False
    """An operator has ordered it to sleep."""
    slept_at: float = -math.inf
    """When it was last ordered to sleep."""
    waking_since: float | None = None
    wake_s: float = WAKE_S_ASSUMED
    ordered: dict[WorkerId, tuple[bool, float]] = field(default_factory=dict)
    """The last order to each worker, and when it was sent."""

    def of(self, *phases: WorkerPhase) -> list[FleetWorker]:
        return [each for each in self.workers if each.phase in phases]

    @property
    def is_ready(self) -> bool:
        return bool(self.of(WorkerPhase.READY))

    @property
    def is_awake(self) -> bool:
        """Whether some worker has an engine, or is starting one."""
        return len(self.of(WorkerPhase.ASLEEP)) < len(self.workers)

    def is_falling_asleep(self, now: float) -> bool:
        """Between two processes its workers may not be registered at all."""
        return not self.is_ready and self.waking_since is None and now - self.slept_at < FALL_ASLEEP_S_MAX

    def expected_s(self, now: float) -> float:
        """Until it serves."""
        return max(WAKE_S_LEAST, self.wake_s - (now - self.waking_since if self.waking_since is not None else 0.0))


class Sleeper:
    """Decides for all models. Call ``update`` with each state of the fleet, then carry out ``orders``."""

    def __init__(self, policy: SleepPolicy) -> None:
        self._policy = policy
        self._models: dict[str, Model] = {}

    def update(self, workers: Sequence[FleetWorker], now: float) -> None:
        by_model = _engines_by_model(workers)
        self._models = {
            name: model
            for name, model in self._models.items()
            if name in by_model or now - model.slept_at < FALL_ASLEEP_S_MAX
        }
        for name in by_model.keys() - self._models.keys():
            if len(self._models) < MODELS_MAX:
                self._models[name] = Model(used_at=now)
        for name, model in self._models.items():
            model.workers = by_model.get(name, [])
            _observe(model, now)

    def used(self, worker_id: WorkerId, now: float) -> None:
        """The worker has served a request. That may name an adapter of its model."""
        for model in self._models.values():
            if any(each.record.worker_id == worker_id for each in model.workers):
                model.used_at = now

    def want(self, name: str, now: float) -> ModelWaking:
        """A request for the model waits."""
        model = self._models.get(name)
        if model is None or model.is_ready:
            return ModelWaking()
        if model.waking_since is not None:
            model.wanted_until = now + WANT_S
            return ModelWaking(asleep=True, expected_s=model.expected_s(now))
        if model.is_awake and not model.is_falling_asleep(now):
            return ModelWaking()  # Its workers start for the first time, or again.
        if not self._policy.on_request:
            return ModelWaking(asleep=True, refusal="only an operator wakes it (`baton wake MODEL`)")
        if not self._has_room(model) and (wait_s := self._room_in_s(now)) > 0.0:
            why = f"{self._others()} awake and in use, and no more may be"
            return ModelWaking(asleep=True, refusal=why, retry_after_s=wait_s)
        model.wanted_until, model.rests = now + WANT_S, False
        return ModelWaking(asleep=True, expected_s=model.expected_s(now))

    def _others(self) -> str:
        return "another model is" if self._policy.awake_max == 1 else f"{self._policy.awake_max} other models are"

    def order(self, name: str, now: float, *, asleep: bool) -> ModelOrdered:
        """An operator orders the model, by its name or an alias, to sleep or to wake."""
        names = (each for each, one in self._models.items() if any(name in it.record.models for it in one.workers))
        model = self._models.get(name) or self._models.get(next(names, ""))
        if model is None:
            known = ", ".join(sorted(self._models)) or "none"
            return ModelOrdered(workers=[], refusal=f"no worker serves {name}; models: {known}")
        phases = (WorkerPhase.READY,) if asleep else (WorkerPhase.ASLEEP,)
        workers = [each.record.worker_id for each in model.of(*phases)]
        if asleep:
            model.rests, model.wanted_until = True, -math.inf
        elif not model.is_awake and not self._has_room(model) and (wait_s := self._room_in_s(now)) > 0.0:
            why = f"{self._others()} awake; the next may sleep in {wait_s:.0f} s"
            return ModelOrdered(workers=[], refusal=why)
        else:
            model.rests, model.wanted_until = False, now + WANT_S
        return ModelOrdered(workers=workers, expected_s=0.0 if asleep or model.is_ready else model.expected_s(now))

    def orders(self, now: float) -> list[Order]:
        """What workers should do now, in the order of need."""
        wanted = [model for model in self._models.values() if model.wanted_until > now]
        resting = [model for name, model in self._models.items() if self._should_sleep(name, model, now)]
        if self._policy.awake_max and len(self._awake()) > self._policy.awake_max:
            resting += [other for other in (self._makes_room(now),) if other is not None and other not in resting]
        for model in wanted:
            if not self._has_room(model) and (other := self._makes_room(now)) is not None and other not in resting:
                resting.append(other)
        return [*self._wake(wanted, now), *self._sleep(resting, now)]

    def _wake(self, wanted: Iterable[Model], now: float) -> Iterator[Order]:
        for model in wanted:
            asleep = model.of(WorkerPhase.ASLEEP)
            if asleep and self._has_room(model):
                if not model.is_ready and model.waking_since is None:
                    model.waking_since = now
                yield from _new_orders(model, asleep, now, asleep=False)

    @staticmethod
    def _sleep(resting: Iterable[Model], now: float) -> Iterator[Order]:
        for model in resting:
            if ready := model.of(WorkerPhase.READY):
                model.slept_at = now
                yield from _new_orders(model, ready, now, asleep=True)

    def _should_sleep(self, name: str, model: Model, now: float) -> bool:
        if not model.is_ready or model.wanted_until > now:
            return False
        return model.rests or now - model.used_at >= self._policy.after_s.get(name, math.inf)

    def _awake(self) -> list[Model]:
        return [model for model in self._models.values() if model.is_awake]

    def _has_room(self, model: Model) -> bool:
        """Whether it may have engines beside the models that are awake."""
        return not self._policy.awake_max or model.is_awake or len(self._awake()) < self._policy.awake_max

    def _makes_room(self, now: float) -> Model | None:
        """The model that was unused longest, if it may sleep now. One at a time: one that falls asleep is enough."""
        if any(model.is_falling_asleep(now) for model in self._awake()):
            return None
        free = [model for model in self._awake() if _unused_in_s(model, now) <= 0.0]
        return min(free, key=lambda model: model.used_at, default=None)

    def _room_in_s(self, now: float) -> float:
        """Until some model may make room; 0: now."""
        awake = self._awake()
        if any(model.is_falling_asleep(now) for model in awake):
            return 0.0
        return max(0.0, min((_unused_in_s(model, now) for model in awake), default=0.0))


def _engines_by_model(workers: Sequence[FleetWorker]) -> dict[str, list[FleetWorker]]:
    by_model: dict[str, list[FleetWorker]] = {}
    for worker in workers:
        if worker.phase not in OVER and worker.record.role is not Role.STORE and worker.record.model:
            by_model.setdefault(worker.record.model, []).append(worker)
    return by_model


def _observe(model: Model, now: float) -> None:
    if any(each.running or each.waiting for each in model.workers):
        model.used_at = now
    if model.is_ready and model.waking_since is not None:
        model.wake_s, model.waking_since, model.used_at = now - model.waking_since, None, now
    if model.waking_since is not None and not model.is_awake and model.wanted_until <= now:
        model.waking_since = None  # Nobody waits any more, and no worker has followed.
    if model.workers and not model.is_awake:
        model.rests = False
    known = {each.record.worker_id for each in model.workers}
    model.ordered = {each: order for each, order in model.ordered.items() if each in known}


def _unused_in_s(model: Model, now: float) -> float:
    """When the model may make room: not while it starts, is wanted or was just used."""
    if not model.is_ready:
        return AWAKE_S_MIN
    return max(model.used_at + AWAKE_S_MIN, model.wanted_until) - now


def _new_orders(model: Model, workers: Iterable[FleetWorker], now: float, *, asleep: bool) -> Iterator[Order]:
    for worker in workers:
        worker_id = worker.record.worker_id
        before, at = model.ordered.get(worker_id, (not asleep, -math.inf))
        if before is not asleep or now - at >= REPEAT_S:
            model.ordered[worker_id] = (asleep, now)
            yield Order(worker_id, asleep)


TICK_S = 0.5
ORDER_S_MAX = 3.0
"""Time limit for a worker to accept an order."""

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
        outage = Outage(log)
        async with asyncio.TaskGroup() as orders:
            while True:
                self._update()
                try:
                    await self._lead(orders) if self._leading() else await self._stand_by()
                    outage.over()
                except BusError as error:
                    outage.failed("cannot manage sleeping models", error)
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
