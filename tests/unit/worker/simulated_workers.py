"""Whole workers around simulated engines in this process, on one memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from opentelemetry.trace import NoOpTracer

from services.worker.engines.port import CURRENT_LEG, Engine
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.engine import SimulatedModel, open_simulated_engine
from services.worker.service import Ending, run_worker
from services.worker.settings import Settings
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord
from shared.runtime.clock import SystemClock
from shared.runtime.service import Service, ServiceFacts, live
from shared.runtime.settings import CommonSettings
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.unit.worker.simulated.builders import INSTANT

SOON_S_MAX = 60.0
LEAVE_S_MAX = 10.0


class Forgetful:
    """An engine that answers something else than what its model says, while ``forgets``."""

    def __init__(self, engine: Engine, *, forgets: bool = True) -> None:
        self.forgets = forgets
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def app(self) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            await self._engine.app(scope, receive, send)
            leg = CURRENT_LEG.get()
            if self.forgets and leg is not None and leg.result.token_ids:
                leg.result.token_ids[-1] += 1

        return call


class Workers:
    """Those of one hub, with what their records said, in order."""

    def __init__(self, model: Path) -> None:
        self.hub = MemoryHub()
        self.bus = MemoryBus(self.hub)
        self.records: dict[str, WorkerRecord] = {}
        self.said: list[tuple[str, Role, WorkerPhase]] = []
        self.services: dict[str, Service] = {}
        self.exits: dict[str, asyncio.Task[int]] = {}
        self.made: list[str] = []
        """Workers whose engines were started."""
        self.endings: dict[str, Ending] = {}
        """Of workers that have ended."""
        self._model = model
        self._changed = asyncio.Event()

    def start(
        self,
        worker_id: str,
        role: Role,
        wrap: Callable[[Engine], Any] = lambda engine: engine,
        *,
        prefix_caching: bool = True,
        **more,
    ) -> None:
        """One more, which is not ready yet. ``wrap`` makes what the worker takes for its engine."""
        settings = Settings(worker_id=worker_id, role=role, engine="simulated", **more)

        async def start_engine(_settings, _common, _say, *, identity) -> Any:
            self.made.append(worker_id)
            timing = SimulationSettings(
                **{"kv_blocks": 512, "max_model_len": 2048, **INSTANT, "transfer": "memory"},
                worker_id=worker_id,
                epoch=identity.epoch,
                prefix_caching=prefix_caching,
            )
            return wrap(await open_simulated_engine(timing, SimulatedModel(directory=self._model)))

        async def main(service: Service) -> None:
            self.endings[worker_id] = await run_worker(service, settings, CommonSettings(), start_engine)

        facts = ServiceFacts(name="worker", instance=worker_id)
        service = self.services[worker_id] = Service(facts, MemoryBus(self.hub), SystemClock(), NoOpTracer())
        self.exits[worker_id] = asyncio.create_task(live(service, main, drain_s_max=LEAVE_S_MAX))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Look at each change of a record."""
        async with asyncio.timeout(SOON_S_MAX):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def until_ready(self, *worker_ids: str) -> None:
        await self.until(lambda: all(self.phase(worker_id) is WorkerPhase.READY for worker_id in worker_ids))

    def phase(self, worker_id: str) -> WorkerPhase | None:
        record = self.records.get(worker_id)
        return None if record is None else record.phase

    async def follow(self) -> None:
        worker_records = await self.bus.key_value_store(WORKER_RECORDS)
        async for entry in worker_records.watch():
            if entry is None:
                continue
            if entry.value is None:
                self.records.pop(WorkerId(entry.key), None)
            else:
                self.records[entry.value.worker_id] = entry.value
                self.said.append((entry.value.worker_id, entry.value.role, entry.value.phase))
            self._changed.set()


@asynccontextmanager
async def workers_on_one_bus(model: Path) -> AsyncIterator[Workers]:
    """None at first; all are stopped at the end."""
    workers = Workers(model)
    following = asyncio.create_task(workers.follow())
    try:
        yield workers
    finally:
        for service in workers.services.values():
            service.stopping.set()
        await asyncio.wait(workers.exits.values(), timeout=LEAVE_S_MAX)
        following.cancel()
        await asyncio.wait([following])
        await workers.bus.close()
