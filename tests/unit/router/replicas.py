"""Several routers with the same workers, on one hub, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.router.service import Router
from services.router.settings import Settings
from services.router.state.reservations import ReservationBook
from services.router.telemetry.tracing import Tracing
from shared.bus.frame_sender import LegFrames
from shared.contracts.ids import RouterId
from shared.contracts.inference import StartLeg
from shared.contracts.workers import Role
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.world import COMPLETIONS, FakeConnection, prompt, settle

RESERVED = ".reserved"


class Hub(MemoryHub):
    """Counts reservations, and drops them on demand."""

    def __init__(self, *, loses_reservations: bool) -> None:
        super().__init__()
        self.reservations = 0
        self._loses = loses_reservations

    def deliver(self, subject: str, payload: bytes, headers: Mapping[str, str], response: Any = None) -> int:
        if subject.endswith(RESERVED):
            self.reservations += 1
            if self._loses:
                return 0
        return super().deliver(subject, payload, headers, response)


class Replicas:
    def __init__(self, hub: Hub, routers: list[Router], workers: list[FakeWorker]) -> None:
        self.hub = hub
        self.routers = routers
        self.workers = workers
        self._asked: list[asyncio.Task[None]] = []

    def ask(self, router: Router, **fields: Any) -> None:
        """Send a request without waiting for its response."""
        connection = FakeConnection()
        http_request = router.edge.admit(connection, COMPLETIONS, [], http11=True, keep=True)
        connection.http_request = http_request
        http_request.upload.add(msgspec.json.encode(prompt(**fields)))
        http_request.upload.complete = True
        self._asked.append(asyncio.ensure_future(router.edge.serve(http_request)))

    async def answered(self) -> None:
        """Wait until all requests have their responses."""
        await asyncio.gather(*self._asked)

    def legs(self) -> list[int]:
        """The legs of each worker so far."""
        return [len(worker.started) for worker in self.workers]

    async def report(self, **numbers: Any) -> None:
        """Every worker reports the load of its legs, plus the load given here."""
        for worker in self.workers:
            await worker.report(legs=len(worker.started), running=len(worker.started), **numbers)
        await settle()


async def never(_worker: FakeWorker, _start: StartLeg, _frames: LegFrames) -> None:
    await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def replicas(routers: int, workers: int, *, loses_reservations: bool = False) -> AsyncIterator[Replicas]:
    """Routers that know each other, and idle workers."""
    hub = Hub(loses_reservations=loses_reservations)
    made = [Router(Settings(log_requests=False), MemoryBus(hub), LoopClock(), Tracing()) for _ in range(routers)]
    for number, router in enumerate(made):  # the same names in each run: instants are drawn by them
        router.reservations.book = ReservationBook(RouterId(f"r{number}"))
    async with asyncio.TaskGroup() as tasks:
        for router in made:
            await router.open()
            router.start(tasks)
        fleet = [FakeWorker(MemoryBus(hub), f"w{n}", Role.BOTH, script=never) for n in range(workers)]
        all_of_them = Replicas(hub, made, fleet)
        for worker in fleet:
            await worker.join()
        while not all(len(router.fleet.cluster.workers) == workers for router in made):
            await asyncio.sleep(0)
        await all_of_them.report()
        await asyncio.sleep(0.1)
        try:
            yield all_of_them
        finally:
            for asked in all_of_them._asked:
                asked.cancel()
            await asyncio.gather(*all_of_them._asked, return_exceptions=True)
            for router in made:
                await router.close()
            for task in list(tasks._tasks):
                task.cancel()
