"""Workers as a planner hears them: records, load reports, and a CHANGE_ROLE that is obeyed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import CHANGE_ROLE, LOAD, WORKER_RECORDS
from shared.contracts.fleet_orders import ChangeRole, RoleChanged
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LoadReport, StepTotals
from shared.contracts.workers import Role, WorkerPhase
from shared.engine_speed.learner import SpeedLearner
from tests.support.fleet_builders import record

PERIOD_S = 0.5
PROMPT_TOKENS_PER_S = 8000
WAITING_TOKENS = 400_000


class PlannedWorker:
    """Computes prompts all the time if it is to prefill; decodes a little otherwise."""

    def __init__(self, bus: Bus, name: str, role: Role, *, refuses: str = "") -> None:
        self.name, self.role = name, role
        self.orders: list[Role] = []
        self._bus = bus
        self._refuses = refuses
        self._learner = SpeedLearner()
        self._seconds = 0.0
        self._tokens = self._decoded = 0

    async def live(self) -> None:
        records = await self._bus.key_value_store(WORKER_RECORDS)
        await self._bus.answer(CHANGE_ROLE, self._change_role, worker_id=self.name)
        while True:
            with contextlib.suppress(BusError):
                await records.put(record(self.name, WorkerPhase.READY, 1, self.role))
                await self._bus.publish(LOAD, self._load())
            await asyncio.sleep(PERIOD_S)

    def _load(self) -> LoadReport:
        is_prefill = self.role is Role.PREFILL
        self._seconds += PERIOD_S if is_prefill else PERIOD_S / 5
        self._tokens += int(PROMPT_TOKENS_PER_S * PERIOD_S) if is_prefill else 0
        self._decoded += 0 if is_prefill else 20
        steps = StepTotals(
            seconds=self._seconds,
            prefill_steps=self._tokens // 2000,
            prefill_tokens=self._tokens,
            decode_steps=self._decoded,
            decode_requests=self._decoded,
        )
        self._learner.observe(steps)
        return LoadReport(
            worker_id=WorkerId(self.name),
            epoch=Epoch(1),
            role=self.role,
            phase=WorkerPhase.READY,
            waiting_tokens=WAITING_TOKENS if is_prefill else 0,
            steps=steps,
            speed=self._learner.speed,
        )

    async def _change_role(self, order: ChangeRole, _envelope: Envelope) -> RoleChanged:
        self.orders.append(order.role)
        before, self.role = self.role, self.role if self._refuses else order.role
        return RoleChanged(
            worker_id=order.worker_id,
            epoch=Epoch(1),
            before=before,
            role=self.role,
            seconds=0.25,
            legs=3,
            failure=self._refuses,
        )


@asynccontextmanager
async def planned_fleet(connect: Callable[[], Bus], *, refuses: str = "") -> AsyncIterator[dict[str, PlannedWorker]]:
    """One prefill worker that has too much to do, and three decode workers that have next to nothing."""
    roles = {"p1": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE, "d3": Role.DECODE}
    workers = {name: PlannedWorker(connect(), name, role, refuses=refuses) for name, role in roles.items()}
    async with asyncio.TaskGroup() as tasks:
        lives = [tasks.create_task(worker.live()) for worker in workers.values()]
        yield workers
        for life in lives:
            life.cancel()
