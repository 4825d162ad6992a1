"""Whole workers around simulated engines in this process, on one memory bus."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.trace import NoOpTracer

from connector.messages import EngineCall, EngineNotification
from services.worker.engines.port import Engine
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


class Faulty:
    """An engine with a fault, while it is ``faulty``."""

    def __init__(self, engine: Engine, *, faulty: bool = True) -> None:
        self.faulty = faulty
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Forgetful(Faulty):
    """Finds other tokens likely than its model."""

    @property
    def app(self) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            async def send_other(message: Any) -> None:
                body = message.get("body", b"")
                if self.faulty and b'"top_logprobs"' in body:
                    said = msgspec.json.decode(body)
                    for choice in said["choices"]:
                        tops = choice["logprobs"]["top_logprobs"]
                        choice["logprobs"]["top_logprobs"] = [
                            {name: one - 2.0 for name, one in top.items()} for top in tops
                        ]
                    message = {**message, "body": msgspec.json.encode(said)}
                await send(message)

            await self._engine.app(scope, receive, send_other)

        return call


class Overwriting(Faulty):
    """Overwrites the KV of prompts that it has read."""

    @property
    def exchange(self) -> Any:
        return OverwritingExchange(self)


class Overflowing(Overwriting):
    """Computes with overwritten KV what is no number, which its server cannot send."""

    @property
    def app(self) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            is_refused = False

            async def send_other(message: Any) -> None:
                nonlocal is_refused
                held.append(message)
                is_refused |= b'"top_logprobs":[' in message.get("body", b"")

            held: list[Any] = []
            await self._engine.app(scope, receive, send_other)
            if is_refused and self.faulty:
                held = [
                    {"type": "http.response.start", "status": 400, "headers": []},
                    {"type": "http.response.body", "body": b"Out of range float values are not JSON compliant: nan"},
                ]
            for message in held:
                await send(message)

        return call


class OverwritingExchange:
    def __init__(self, engine: Overwriting) -> None:
        self._engine = engine
        self._exchange = engine._engine.exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    async def call(self, call: EngineCall) -> EngineNotification:
        if self._engine.faulty and call.digests:
            contents = self._engine._engine._core.cache.contents
            contents[:] = array("q", [7] * len(contents))
        return await self._exchange.call(call)


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
        settings = Settings(**{"worker_id": worker_id, "role": role, "engine": "simulated", **more})

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
