"""Publishes a worker's KV events, load and speed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.worker.engines.port import Engine, EngineDead
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.telemetry.kv_events import HeldBlocks
from shared.bus.port import Bus, BusDown, Envelope
from shared.contracts.channels import KV_EVENTS, LOAD
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvEvent, KvEventBatch, KvSnapshot, KvTier
from shared.contracts.load import LOAD_HZ_MAX, LOAD_PERIOD_S_MAX, LoadReport
from shared.contracts.workers import Role, WorkerPhase
from shared.engine_speed.learner import SpeedLearner

log = logging.getLogger("baton.worker")


class CachePublisher:
    """KV events with sequence numbers, and the snapshot that a router asks for when one is missing."""

    def __init__(self, bus: Bus, worker_id: WorkerId, epoch: Epoch) -> None:
        self.held = HeldBlocks()
        self._bus = bus
        self._worker_id = worker_id
        self._epoch = epoch
        self._pending: list[KvEvent] = []
        self._arrived = asyncio.Event()

    async def follow(self, engine: Engine) -> None:
        """Publish the engine's events until cancelled. Raises EngineDead."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(), name="publish-kv-events")
            async for events in engine.kv_events():
                self._pending.extend(events)
                self._arrived.set()
            raise EngineDead("the engine's KV events have ended")

    async def answer(self, _ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        """Handler of KV_SNAPSHOT."""
        return KvSnapshot(
            worker_id=self._worker_id,
            epoch=self._epoch,
            seq=self.held.seq,
            hashes=self.held.packed(),
            host_hashes=self.held.packed(KvTier.HOST),
            disk_hashes=self.held.packed(KvTier.DISK),
        )

    async def _publish(self) -> None:
        """All events of one loop turn go in one batch. A batch that cannot be sent leaves a gap in the numbers, after
        which routers ask for a snapshot.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            events, self._pending = self._pending, []
            seq = self.held.apply(events)
            batch = KvEventBatch(worker_id=self._worker_id, epoch=self._epoch, seq=seq, events=events)
            try:
                await self._bus.publish(KV_EVENTS, batch)
            except BusDown:
                log.debug("KV event batch %d was not sent: NATS is down", seq)


class LoadPublisher:
    """The load report: on each change, at most LOAD_HZ_MAX times a second, and at least once in LOAD_PERIOD_S_MAX."""

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        epoch: Epoch,
        role: Role,
        *,
        held: HeldBlocks,
        engine: Engine,
        exchange: WorkerExchange | None = None,
    ) -> None:
        self.role = role
        self._bus = bus
        self._worker_id = worker_id
        self._epoch = epoch
        self._held = held
        self._engine = engine
        self._exchange = exchange
        self._learner = SpeedLearner()
        self._is_changed = asyncio.Event()
        engine.on_load_changed(self._is_changed.set)
        if exchange is not None:
            exchange.on_changed(self.changed)

    def changed(self) -> None:
        """Something in the report may have changed."""
        self._is_changed.set()

    async def follow(self, now: Callable[[], tuple[WorkerPhase, int]]) -> None:
        """Report until cancelled. ``now`` returns the worker's phase and the sequences of its legs."""
        least_s = 1.0 / LOAD_HZ_MAX
        while True:
            self._is_changed.clear()
            await self.report(*now())
            await asyncio.sleep(least_s)
            try:
                async with asyncio.timeout(LOAD_PERIOD_S_MAX - least_s):
                    await self._is_changed.wait()
            except TimeoutError:
                pass

    async def report(self, phase: WorkerPhase, legs: int) -> None:
        load = self._engine.load()
        if load.steps is not None:
            self._learner.observe(load.steps)
        numbers = {name: getattr(load, name) for name in load.__slots__}
        exchange = None if self._exchange is None else self._exchange.state
        if exchange is not None:
            numbers["received_bytes_total"] = exchange.read_bytes_total
            numbers["received_seconds_total"] = exchange.read_seconds_total
            if not (load.running or load.waiting or self.role is Role.STORE):
                numbers["kv_blocks_used"] = exchange.pinned_blocks  # An idle engine takes no step to count leases.
        report = LoadReport(
            worker_id=self._worker_id,
            epoch=self._epoch,
            role=self.role,
            phase=phase,
            legs=legs,
            kv_blocks_total=self._engine.facts.kv_blocks,
            digest=self._held.digest(),
            exchange=exchange,
            speed=self._learner.speed,
            engine_silent_s=0.0 if self._exchange is None else self._exchange.unanswered_s,
            **numbers,
        )
        try:
            await self._bus.publish(LOAD, report)
        except BusDown:
            log.debug("a load report was not sent: NATS is down")
