"""A router on a memory bus with fake workers and in-memory clients. Time is virtual: see ``in_world``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from services.router.relay.failure_policy import FailurePolicy
from services.router.request.http_request import HttpRequest
from services.router.service import Router
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.passed_trials import PassedTrials
from services.router.tokenize.trials import Trials
from shared.bus.port import BusDown
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import REQUESTS_FINISHED
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.workers import Role
from shared.telemetry.tracing import SpanSink
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock, as_test, run_in_virtual_time
from tests.unit.router.fake_worker import FakeWorker, Script, serve_leg

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SALT = "s" * 32


@cache
def passed_trials(state: Path) -> PassedTrials:
    """Shared by all tests of the process, so that each tokenizer without a fault is tried once: a child takes 0.3 s of CPU."""
    return PassedTrials(state / "passed-trials")


class FakeConnection:
    """A client that reads everything at once, unless ``reads`` is cleared."""

    def __init__(self) -> None:
        self.written = b""
        self.writes = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.closed = False
        self.aborted = False
        self.http_request: HttpRequest | None = None

    def write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1

    def write_paused(self) -> bool:
        return not self.reads.is_set()

    async def drain(self) -> None:
        await self.reads.wait()

    def common_headers(self) -> bytes:
        return b""

    def answered(self, *, close: bool) -> None:
        self.closed = close

    def abort(self) -> None:
        self.aborted = True
        self.leave()

    def leave(self) -> None:
        assert self.http_request is not None
        self.http_request.client_left()
        self.reads.set()


@dataclass
class HttpResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body)["error"]


def parse(written: bytes) -> HttpResponse:
    """Parse the bytes of a response as a client does."""
    head, _, rest = written.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = dict(one.split(": ", 1) for one in lines)
    if headers.get("transfer-encoding") == "chunked":
        rest = unchunk(rest)
    return HttpResponse(int(line.split()[1]), headers, rest)


def unchunk(rest: bytes) -> bytes:
    data = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        data += rest[:length]
        rest = rest[length + 2 :]
    return data


class World:
    def __init__(self, settings: Settings, sink: SpanSink | None = None, failures: FailurePolicy | None = None) -> None:
        self.hub = MemoryHub()
        self.bus = MemoryBus(self.hub)
        tracing = Tracing(sink, LoopClock())
        trials = Trials(passed_trials(Path(os.environ["XDG_STATE_HOME"])))
        self.router = Router(settings, self.bus, LoopClock(), tracing, failures=failures, trials=trials)
        self.workers: dict[str, FakeWorker] = {}
        self.tasks = asyncio.TaskGroup()

    async def worker(self, worker_id: str, role: Role = Role.BOTH, script: Script = serve_leg, **kw: Any) -> FakeWorker:
        """Add a worker; the router knows it when this returns."""
        worker = FakeWorker(MemoryBus(self.hub), worker_id, role, script=script, **kw)
        self.workers[worker_id] = worker
        await worker.join()
        await worker.report()
        self.tasks.create_task(self._keep_reporting(worker))
        while worker_id not in self.router.fleet.cluster.workers:
            await asyncio.sleep(0)
        await settle()
        return worker

    async def pair(
        self, prefill: Script = serve_leg, decode: Script = serve_leg, **kw: Any
    ) -> tuple[FakeWorker, FakeWorker]:
        """A prefill worker ``p1`` and a decode worker ``d1``."""
        return await self.worker("p1", Role.PREFILL, prefill, **kw), await self.worker("d1", Role.DECODE, decode, **kw)

    async def _keep_reporting(self, worker: FakeWorker) -> None:
        while worker.alive:
            await asyncio.sleep(0.5)
            with contextlib.suppress(BusDown):
                await worker.report()

    def begin(
        self, body: bytes, *, path: str = COMPLETIONS, **headers: str
    ) -> tuple[FakeConnection, asyncio.Task[None]]:
        """Send a request; the task ends with its response."""
        connection = FakeConnection()
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        http_request = self.router.edge.admit(connection, path, raw, http11=True, keep=True)
        connection.http_request = http_request
        if http_request.refusal is not None:
            http_request.refuse(http_request.refusal)
            return connection, asyncio.ensure_future(asyncio.sleep(0))
        http_request.upload.add(body)
        http_request.upload.complete = True
        return connection, asyncio.ensure_future(self.router.edge.serve(http_request))

    async def ask(self, body: dict[str, Any] | bytes, *, path: str = COMPLETIONS, **headers: str) -> HttpResponse:
        """Send a request and return its response."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        connection, answering = self.begin(raw, path=path, **headers)
        await answering
        return parse(connection.written)

    async def reports(self) -> list[RequestFinished]:
        """What routers report of finished requests from now on."""
        heard: list[RequestFinished] = []
        await self.bus.subscribe(REQUESTS_FINISHED, lambda message, _: heard.extend(message.requests))
        return heard


async def settle() -> None:
    """Run all tasks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def open_world(settings: Settings, sink: SpanSink | None = None, failures: FailurePolicy | None = None):
    world = World(settings, sink, failures)
    await world.router.open()
    async with world.tasks as tasks:
        world.router.start(tasks)
        try:
            yield world
        finally:
            await world.router.close()
            for task in list(tasks._tasks):
                task.cancel()


def run_in_world(
    scenario: Callable[[World], Awaitable[None]],
    sink: SpanSink | None = None,
    failures: FailurePolicy | None = None,
    **settings: Any,
) -> None:
    """Run a scenario in virtual time; its spans go to ``sink``."""

    async def main() -> None:
        async with open_world(Settings(log_requests=False, **settings), sink, failures) as world:
            await scenario(world)

    run_in_virtual_time(main())


def in_world(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test in virtual time, with a world as its first argument."""
    return lambda test: as_test(
        test, lambda *args, **kw: run_in_world(lambda world: test(world, *args, **kw), **settings), given=1
    )


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", **fields}


def long_prompt(**fields: Any) -> dict[str, Any]:
    """One with some blocks of KV, which a prefill worker can hand over."""
    return prompt(prompt="hello " * 64, **fields)


def give_legs(world: World, worker_id: str, legs: int) -> None:
    """Load a worker with legs, so that the router tries equal workers first."""
    cluster = world.router.fleet.cluster
    view = cluster.workers[WorkerId(worker_id)]
    view.own.legs = legs
    view.write_load(cluster.table)


def keys(**fields: object) -> dict[str, str]:
    """Settings with one key, ``k``, of this tenant's limits."""
    lines = [f"{name} = {value}" for name, value in fields.items()]
    return {"keys": "\n".join([f'salt = "{SALT}"\n[[key]]\ntenant = "t"\nsha256 = "{digest_of("k")}"', *lines])}
