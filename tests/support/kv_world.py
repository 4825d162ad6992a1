"""Workers that exchange KV, as processes which a test kills and starts again, and a driver that sends them legs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shared.contracts.workers import WorkerPhase
from tests.support.kv_driver import Driver, driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import READY_S_MAX, WorkerProcess, start_worker

MS = 1_000_000
WorldT = TypeVar("WorldT", bound="KvWorld")


@dataclass
class KvWorld:
    nats: NatsServer
    folder: Path
    """Logs of the workers, and their state."""
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    started_ms: dict[str, int] = field(default_factory=dict)
    """Wall clock: epochs are later."""

    def start(self, name: str, **settings: str) -> WorkerProcess:
        self.started_ms[name] = time.time_ns() // MS
        self.workers[name] = start_worker(
            self.nats.url, name, self.folder, environ={"BATON_STATE_DIR": str(self.folder)}, **settings
        )
        return self.workers[name]

    def kill(self, *names: str) -> None:
        for name in names:
            self.workers.pop(name).kill()

    async def ready(self, driver: Driver) -> None:
        """Wait until all workers that run are ready, as they say now: records outlive who is killed."""

        def are_ready() -> bool:
            for name, worker in self.workers.items():
                assert worker.process.poll() is None, (name, worker.process.poll(), worker.log.read_text())
            loads = driver.tap.loads
            return all(
                (load := loads.get(name)) and load.phase is WorkerPhase.READY and load.epoch >= self.started_ms[name]
                for name in self.workers
            )

        await driver.tap.until(are_ready, "all workers are ready", READY_S_MAX)


@contextmanager
def kv_world(folder: Path, kind: type[WorldT]) -> Iterator[WorldT]:
    """One without workers; at the end those are killed that it has."""
    with NatsServer(folder, has_buckets=True) as nats:
        world = kind(nats, folder)
        try:
            yield world
        finally:
            world.kill(*list(world.workers))


@asynccontextmanager
async def driver_of(world: KvWorld) -> AsyncIterator[Driver]:
    """When all workers are ready."""
    async with Tap(world.nats.url) as tap, driving(tap) as driver:
        await world.ready(driver)
        yield driver
