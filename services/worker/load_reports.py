"""The load reports of a worker: what its engine does now, how fast it is, and what the KV exchange has read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext

import msgspec

from services.worker.engines.port import Engine
from services.worker.kv_events import HeldBlocks
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.late_reports import LateReports
from shared.bus.port import Bus, BusDown
from shared.contracts.channels import LOAD
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LOAD_HZ_MAX, LOAD_PERIOD_S_MAX, EngineSpeed, LoadReport
from shared.contracts.workers import Role, WorkerPhase
from shared.engine_speed.learner import SpeedLearner

log = logging.getLogger("baton.worker")


class LoadPublisher:
    """Publishes the report on each change, at most LOAD_HZ_MAX times a second, at least once in LOAD_PERIOD_S_MAX."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        bus: Bus,
        worker_id: WorkerId,
        epoch: Epoch,
        role: Role,
        *,
        held: HeldBlocks,
        engine: Engine,
        exchange: WorkerExchange | None = None,
        late: LateReports | None = None,
        speed_of: Callable[[EngineSpeed | None], EngineSpeed | None] | None = None,
    ) -> None:
        """``speed_of``: the speed to publish when the worker has learned this one; None: just that."""
        self.role = role
        self._bus = bus
        self._worker_id = worker_id
        self._epoch = epoch
        self._held = held
        self._engine = engine
        self._exchange = exchange
        self._late = late
        self._speed_of = speed_of or (lambda own: own)
        self._learner = SpeedLearner()
        self._is_changed = asyncio.Event()
        engine.on_load_changed(self._is_changed.set)
        if exchange is not None:
            exchange.on_changed(self.changed)

    def changed(self) -> None:
        self._is_changed.set()

    async def publish(self, now: Callable[[], tuple[WorkerPhase, int]]) -> None:
        """Publish reports until cancelled. ``now`` returns the worker's phase and the sequences of its legs."""
        least_s = 1.0 / LOAD_HZ_MAX
        with self._late or nullcontext():
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
            self._learner.observe(load.steps, load.prompt_steps)
        numbers = msgspec.structs.asdict(load)
        del numbers["prompt_steps"]
        exchange = None if self._exchange is None else self._exchange.state
        if exchange is not None:
            numbers["received_bytes_total"] = exchange.read_bytes_total
            numbers["received_seconds_total"] = exchange.read_seconds_total
            if not (load.running or load.waiting or self.role is Role.STORE):
                # An idle engine takes no step to count leases.
                pinned = exchange.pinned_blocks / exchange.blocks if exchange.blocks else 0.0
                numbers["kv_tokens_used"] = round(pinned * self._engine.facts.kv_tokens)
        report = LoadReport(
            worker_id=self._worker_id,
            epoch=self._epoch,
            role=self.role,
            phase=phase,
            legs=legs,
            kv_tokens_total=self._engine.facts.kv_tokens,
            digest=self._held.digest(),
            exchange=exchange,
            speed=self._speed_of(self._learner.speed),
            engine_silent_s=0.0 if self._exchange is None else self._exchange.unanswered_s,
            **numbers,
        )
        if self._late is not None:
            self._late.sent(report)
        try:
            await self._bus.publish(LOAD, report)
        except BusDown:
            log.debug("a load report was not sent: NATS is down")
