"""Feeds the fleet's view from the bus: worker records, load reports and losses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.router.state.fleet import Fleet
from services.router.state.kv_feed import KvFeed
from services.router.state.reservation_feed import ReservationFeed
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.tokenize.prompts import Prompts
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Bus, Envelope, StoredValue
from shared.contracts.channels import LOAD, WORKER_LOST, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import WORKER_RECORD_TTL_S, Role, WorkerLost, WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

SWEEP_S = 1.0
"""Interval at which workers that are neither registered nor heard are dropped."""


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
        prompts: Prompts,
        kv: KvFeed,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._inbox = inbox
        self._speeds = speeds
        self._fleet_changed = fleet_changed
        """Called with the delay in seconds after which a scheduling pass should run."""
        self._reservations = reservations
        self._prompts = prompts
        self._kv = kv

    async def open(self) -> None:
        """Listen; live when it returns."""
        self._fleet.cluster.is_whole = False
        await self._bus.subscribe(LOAD, self._on_load)
        await self._bus.subscribe(WORKER_LOST, self._on_lost)

    async def follow_registry(self) -> None:
        """Watch the workers' records until cancelled."""
        store = await self._bus.key_value_store(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
        async for entry in store.watch():
            if entry is None:
                self._fleet.cluster.is_whole = True
            else:
                self._on_record(entry)

    async def sweep(self) -> None:
        """Drop vanished workers until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for record in self._fleet.cluster.sweep(self._clock.now(), self._fleet.policy.silent_s_max):
                self._fleet.index.drop(record.worker_id)
                self._speeds.gone(record.worker_id)
                self._inbox.worker_lost(record.worker_id, record.epoch)
                log.info("worker %s is gone", record.worker_id)
            self._fleet_changed(0.0)  # A worker that falls silent causes no event.

    def _on_record(self, entry: StoredValue[WorkerRecord]) -> None:
        record = entry.value
        if record is None:
            self._fleet.cluster.unregister(WorkerId(entry.key))
            return
        known = self._fleet.cluster.workers.get(record.worker_id)
        self._fleet.cluster.record(record, self._clock.now())
        self._speeds.joined(record)
        self._fleet_changed(0.0)
        if known is not None and known.record.epoch < record.epoch:
            self._inbox.worker_lost(
                record.worker_id, known.record.epoch
            )  # It restarted before its silence was noticed.
        if known is None or known.record.epoch < record.epoch:
            log.info("worker %s: %s of %s, %s", record.worker_id, record.role, record.models, record.phase)
        if record.phase is not WorkerPhase.STARTING:  # a starting worker does not reply
            if record.role is not Role.STORE:  # a store has neither engine nor tokenizer
                self._prompts.worker_seen(record)
            self._kv.worker_joined(record.worker_id, record.epoch)

    def _on_load(self, load: LoadReport, _envelope: Envelope) -> None:
        self._fleet.cluster.report(load, self._clock.now())
        self._speeds.load(load)
        self._fleet_changed(self._reservations.book.lag_s())
        if load.digest is not None:
            self._kv.check(load.worker_id, load.epoch, load.digest)

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._fleet.cluster.lose(lost.worker_id, lost.epoch)
        self._inbox.worker_lost(lost.worker_id, lost.epoch)
