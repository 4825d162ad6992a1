"""Several routers with queued requests do not all send the next one to the same free engine."""

from __future__ import annotations

import asyncio

from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegReport, StartLeg
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.router.fake_worker import JSON, WHOLE_RESPONSE, FakeWorker
from tests.unit.router.replicas import replicas

PROMPT_TOKENS, PROMPT_S = 1000, 0.25
REQUESTS, WORKERS = 48, 2


class Engine:
    """Computes prompts one after another and reports its load as a real worker does."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._queue: list[LegFrames] = []
        self._changed = asyncio.Event()
        self.longest = 0
        self.computed = 0
        worker.script = self.begin

    def begin(self, _worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        self._queue.append(frames)
        self.longest = max(self.longest, len(self._queue))
        self._changed.set()

    async def compute(self) -> None:
        while True:
            while not self._queue:
                await asyncio.sleep(0.001)
            await asyncio.sleep(PROMPT_S)
            frames = self._queue.pop(0)
            frames.head(200, JSON)
            frames.data(WHOLE_RESPONSE)
            frames.end(LegReport(prompt_tokens=PROMPT_TOKENS, completion_tokens=1))
            self.computed += 1
            self._changed.set()

    async def report(self) -> None:
        while True:
            self._changed.clear()
            legs = len(self._queue)
            await self._worker.report(legs=legs, running=legs, waiting_tokens=PROMPT_TOKENS * legs)
            await asyncio.sleep(0.1)
            try:
                async with asyncio.timeout(0.9):
                    await self._changed.wait()
            except TimeoutError:
                pass


def queues(routers: int, *, loses_reservations: bool = False) -> tuple[list[int], float]:
    """Returns the longest queue of each engine and the total time."""

    async def scenario() -> tuple[list[int], float]:
        async with (
            replicas(routers, WORKERS, loses_reservations=loses_reservations) as system,
            asyncio.TaskGroup() as tasks,
        ):
            engines = [Engine(worker) for worker in system.workers]
            running = [tasks.create_task(work) for one in engines for work in (one.compute(), one.report())]
            begun = asyncio.get_running_loop().time()
            for number in range(REQUESTS):
                system.ask(system.routers[number % routers], prompt="word " * 800, max_tokens=1)
                await asyncio.sleep(0.002)
            await system.answered()
            took_s = asyncio.get_running_loop().time() - begun
            for task in running:
                task.cancel()
            assert sum(one.computed for one in engines) == REQUESTS
            return [one.longest for one in engines], took_s

    return run_in_virtual_time(scenario())


def test_many_routers_keep_engine_queues_short_and_engines_busy():
    alone, alone_s = queues(1)
    together, together_s = queues(4)
    herded, _ = queues(4, loses_reservations=True)

    assert max(together) <= 2 * max(alone)
    assert max(herded) >= 2 * max(together)
    assert together_s < 1.05 * alone_s
