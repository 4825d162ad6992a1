"""Keeps the view of the fleet up to date: the workers' records, their load reports, and which of them are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from services.router.feeds.kv import KvFeed
from services.router.feeds.reservations import ReservationFeed
from services.router.placement.fleet import Fleet
from services.router.state.quarantine import Quarantine
from services.router.state.record_check import record_fault
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.tokenize.prompts import Prompts
from shared.bounded import Bounded
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Bus, Envelope, StoredValue
from shared.contracts.channels import LOAD, WORKER_LOST, WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import WorkerLoad
from shared.contracts.workers import WITHOUT_ENGINE, Role, WorkerLost, WorkerRecord
from shared.runtime.clock import Clock
from shared.runtime.waiting import REGISTRY, Waits

log = logging.getLogger("baton.router")

SWEEP_S: Final = 1.0
"""Interval at which workers that are neither registered nor heard are dropped."""
REFUSED_MAX: Final = 1024
"""Workers whose records were refused, and of which this was logged."""


class FleetFeed:
    """Keeps ``Fleet.cluster`` up to date."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        *,
        bus: Bus,
        clock: Clock,
        fleet: Fleet,
        inbox: LegInbox,
        speeds: WorkerSpeeds,
        fleet_changed: Callable[[float], None],
        reservations: ReservationFeed,
        quarantine: Quarantine,
        prompts: Prompts,
        kv: KvFeed,
        waits: Waits,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._inbox = inbox
        self._speeds = speeds
        self._fleet_changed = fleet_changed
        """Called with the delay in seconds after which a scheduling pass should run."""
        self._reservations = reservations
        self._quarantine = quarantine
        self._prompts = prompts
        self._kv = kv
        self._waits = waits
        self._refused: Bounded[WorkerId, tuple[Epoch, str]] = Bounded(REFUSED_MAX)
        """The fault that was logged last, by worker."""

    async def open(self) -> None:
        """Subscribe; the subscriptions are active on return."""
        self._fleet.cluster.is_whole = False
        await self._bus.subscribe(LOAD.read_as(WorkerLoad), self._on_load, in_batches=True)
        await self._bus.subscribe(WORKER_LOST, self._on_lost)

    async def follow_registry(self) -> None:
        """Watch the workers' records until cancelled; waits for JetStream."""
        open_store = partial(self._bus.key_value_store, WORKER_RECORDS)
        store = await self._waits.until(REGISTRY, open_store)
        async for entry in store.watch():
            if entry is None:
                self._fleet.cluster.is_whole = True
            else:
                self._on_record(entry)

    async def sweep(self) -> None:
        """Drop vanished workers, and old measurements, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._speeds.sweep()
            for record in self._fleet.cluster.sweep(self._clock.now(), self._fleet.policy.silent_s_max):
                self._fleet.index.drop(record.worker_id)
                self._speeds.gone(record.worker_id)
                self._inbox.worker_lost(record.worker_id, record.epoch)
                self._prompts.workers_changed()
                log.info("worker %s is gone", record.worker_id)
            self._fleet_changed(0.0)  # A worker that falls silent causes no event.

    def _on_record(self, entry: StoredValue[WorkerRecord]) -> None:
        record = entry.value
        if record is None:
            self._fleet.cluster.unregister(WorkerId(entry.key))
            return
        if not self._accepts(record):
            return
        known = self._fleet.cluster.workers.get(record.worker_id)
        is_new = self._fleet.cluster.record(record, self._clock.now())
        self._fleet_changed(0.0)
        if not is_new:
            return
        self._prompts.workers_changed()
        self._speeds.joined(record)
        if known is not None and known.record.epoch < record.epoch:
            # The worker restarted before its silence was noticed.
            self._inbox.worker_lost(record.worker_id, known.record.epoch)
        if known is None or known.record.epoch < record.epoch:
            log.info("worker %s: %s of %s, %s", record.worker_id, record.role, record.models, record.phase)
        if record.phase not in WITHOUT_ENGINE:  # Such a worker does not reply.
            if record.role is not Role.STORE:  # A store has neither engine nor tokenizer.
                self._prompts.worker_seen(record)
            if not record.attached:  # What its server has cached is not known.
                self._kv.worker_joined(record.worker_id, record.epoch)

    def _accepts(self, record: WorkerRecord) -> bool:
        """Whether the record can be a worker's. One of a worker that can is kept until it expires."""
        fault = record_fault(record)
        if not fault:
            self._refused.pop(record.worker_id, None)
        elif self._refused.get(record.worker_id) != (record.epoch, fault):
            self._refused[record.worker_id] = record.epoch, fault
            log.warning("the record of worker %s is refused: %s", record.worker_id, fault)
        return not fault

    def _on_load(self, load: WorkerLoad, _envelope: Envelope) -> None:
        if self._fleet.report(load, self._clock.now()):
            self._prompts.workers_changed()
        self._quarantine.reported(load.worker_id, load.epoch)
        self._speeds.load(load)
        self._fleet_changed(self._reservations.book.lag_s())
        if load.digest is not None:
            self._kv.check(load.worker_id, load.epoch, load.digest)

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._fleet.cluster.lose(lost.worker_id, lost.epoch)
        self._inbox.worker_lost(lost.worker_id, lost.epoch)
