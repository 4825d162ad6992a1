"""Runs an orchestrator: follows worker records and load reports, and publishes the fleet's state while it leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from services.orchestrator.adapter_orders import AdapterOrders
from services.orchestrator.buckets import KeptFor, keep_buckets, make_buckets
from services.orchestrator.leadership import Candidate, stand_for_leadership
from services.orchestrator.lifecycle import Fleet, Limits
from services.orchestrator.planner.planning import Planning
from services.orchestrator.planner.rules import Rules
from services.orchestrator.planner.scalers import stateful_set_scaler
from services.orchestrator.settings import Settings
from services.orchestrator.sleeping import Sleeping, SleepPolicy
from services.orchestrator.weights import WeightOrders
from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError, Envelope, KeyValueStore, StoredValue, Subscription
from shared.contracts.channels import DESCRIBE_FLEET, FLEET_STATE, LEADERSHIP, LOAD, WORKER_LOST, WORKER_RECORDS
from shared.contracts.control import Leadership
from shared.contracts.ids import WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import DescribeFleet, FleetState, FleetWorker, WorkerLost, WorkerRecord
from shared.deadline import unless
from shared.runtime.clock import Clock
from shared.runtime.settings import SettingsError
from shared.runtime.waiting import REGISTRY, Waits

ROLE = "orchestrator"
LEADER_ENTRY = "JetStream (leadership entry)"
STATE_PERIOD_S = 1.0
TICK_S = 0.1
"""Delay with which a silent worker may be noticed."""

log = logging.getLogger(__name__)


def check(settings: Settings) -> None:
    """Raises SettingsError for values that are well-formed but invalid."""
    try:
        Rules.from_settings(settings)
        SleepPolicy.from_settings(settings)
        stateful_set_scaler(settings, list)
    except ValueError as error:
        raise SettingsError(f"{error}; correct it or unset it") from error


class Orchestrator:
    """Leader or standby. A standby follows the fleet as well, so that it knows it when it takes over."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        name: str,
        settings: Settings,
        rules: Rules | None = None,
        waits: Waits | None = None,
    ) -> None:
        """``rules``: the planner's; those of the settings if not given."""
        self._bus = bus
        self._clock = clock
        self._waits = waits or Waits(clock.now)
        self._fleet = Fleet(Limits())
        self._candidate = Candidate(ROLE, name, settings.lease_s)
        self._kept_for = KeptFor.from_settings(settings)
        rules = rules or Rules.from_settings(settings)
        self._planning = Planning(bus, clock, settings, rules, leading=lambda: self.leading, fleet=self._workers)
        self._adapters = AdapterOrders(bus, clock, self._workers, leading=lambda: self.leading)
        self._weights = WeightOrders(bus, clock, self._workers, leading=lambda: self.leading)
        sleep_policy = SleepPolicy.from_settings(settings)
        self._sleeping = Sleeping(bus, clock, sleep_policy, leading=lambda: self.leading, fleet=self._workers)
        self._unpublished: list[WorkerLost] = []
        """Losses to publish. A standby drops them: its fleet still has them when it takes over."""
        self._fleet_known = asyncio.Event()
        self._published = (-1, 0.0)
        """Revision and time of the last published fleet state."""
        self._subscription: Subscription | None = None
        """Held while leading."""

    @property
    def leading(self) -> bool:
        return self._candidate.may_lead(self._clock.now())

    def describe(self) -> FleetState:
        return FleetState(leader=self._candidate.name, term=self._candidate.term, workers=self._workers())

    def _workers(self) -> list[FleetWorker]:
        return self._fleet.described(self._clock.now())

    async def run(self, stopping: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until ``stopping``; calls ``on_ready`` when all records have been read. Waits for JetStream."""
        stores = await unless(stopping, self._open_stores())
        if stores is None:
            return
        records, leadership = stores
        self._bus.on_reconnect(self._candidate.doubt)
        async with asyncio.TaskGroup() as tasks:
            await self._bus.subscribe(LOAD, self._load_reported)
            await self._bus.subscribe(FLEET_STATE, self._state_published)
            await self._planning.listen()
            await self._sleeping.listen()
            buckets = keep_buckets(self._bus, self._candidate.lease_s, self._kept_for)
            running = [
                tasks.create_task(buckets, name="keep-buckets"),
                tasks.create_task(self._follow(records.watch()), name="follow-records"),
            ]
            await unless(stopping, self._waits.until(REGISTRY, self._fleet_known.wait))
            running += [
                tasks.create_task(self._publish(), name="publish"),
                tasks.create_task(self._planning.run(), name="plan"),
                tasks.create_task(self._adapters.run(), name="order-adapters"),
                tasks.create_task(self._weights.run(), name="order-weights"),
                tasks.create_task(self._sleeping.run(), name="sleep"),
            ]
            on_ready()
            await stand_for_leadership(self._candidate, leadership, self._clock, stopping)
            for task in running:
                task.cancel()

    async def _open_stores(self) -> tuple[KeyValueStore[WorkerRecord], KeyValueStore[Leadership]]:
        bus, until = self._bus, self._waits.until
        await until(REGISTRY, lambda: make_buckets(bus, self._candidate.lease_s, self._kept_for))
        return (
            await until(REGISTRY, lambda: bus.key_value_store(WORKER_RECORDS)),
            await until(LEADER_ENTRY, lambda: bus.key_value_store(LEADERSHIP)),
        )

    async def _follow(self, changes: AsyncIterator[StoredValue[WorkerRecord] | None]) -> None:
        async for change in changes:
            now = self._clock.now()
            if change is None:
                self._fleet_known.set()
            elif change.value is None:
                self._unpublished += self._fleet.unregistered(WorkerId(change.key), now)
            else:
                self._unpublished += self._fleet.registered(change.value, now)

    def _load_reported(self, load: LoadReport, _envelope: Envelope) -> None:
        self._unpublished += self._fleet.heard(load, self._clock.now())
        self._planning.reported(load)

    def _state_published(self, state: FleetState, _envelope: Envelope) -> None:
        self._fleet.bus_heard(self._clock.now())
        self._candidate.heard(state.term)

    async def _publish(self) -> None:
        outage = Outage(log)
        while True:
            self._unpublished += self._fleet.tick(self._clock.now())
            try:
                await (self._lead() if self.leading else self._stand_by())
                outage.over()
            except BusError as error:
                outage.failed("cannot publish the fleet's state", error)
            await asyncio.sleep(TICK_S)

    async def _lead(self) -> None:
        now = self._clock.now()
        if self._subscription is None:
            # The last leader may not have published all losses. Receiving a loss twice does no harm.
            self._unpublished = self._fleet.losses(now)
            self._subscription = await self._bus.answer(DESCRIBE_FLEET, self._answer)
            self._published = (-1, 0.0)
        while self._unpublished:
            await self._bus.publish(WORKER_LOST, self._unpublished[0])
            lost = self._unpublished.pop(0)
            log.warning("worker %s (epoch %d) lost, silent %.1f s", lost.worker_id, lost.epoch, lost.silent_s)
        revision, at = self._published
        if revision != self._fleet.revision or now - at >= STATE_PERIOD_S:
            self._published = (self._fleet.revision, now)
            await self._bus.publish(FLEET_STATE, self.describe())

    async def _stand_by(self) -> None:
        self._unpublished.clear()
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()
            log.warning("no longer leading")

    async def _answer(self, _ask: DescribeFleet, _envelope: Envelope) -> FleetState:
        return self.describe()
