"""A router with batches, an engine that answers lines, and clients of its files and batches. Time is virtual."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from services.router.service import Router
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from shared.bus.frame_sender import LegFrames
from shared.contracts.api_keys import digest_of
from shared.contracts.inference import LegReport, StartLeg
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import LoopClock, as_test
from tests.unit.router.fake_worker import JSON, FakeWorker
from tests.unit.router.world import World, run_in_world

COMPLETIONS = "/v1/completions"
ON: dict[str, Any] = {"files_bytes_max": 1_000_000}
KEY = '[[key]]\ntenant = "{0}"\nname = "{0}"\nsha256 = "{1}"\n'
KEYS = f'salt = "{"s" * 32}"\n' + KEY.format("acme", digest_of(b"a")) + KEY.format("other", digest_of(b"o"))
UNTIL_S_MAX = 4000.0


class Engine:
    """Answers each prompt with itself, unless it ``stays``; prompts that begin with "bad" get 400."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.stays: Callable[[str], bool] = lambda _prompt: False
        self.usage: dict[str, Any] | None = None

    def __call__(self, _worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        text = msgspec.json.decode(start.body)["prompt"]
        self.prompts.append(text)
        if self.stays(text):
            return
        frames.head(400 if text.startswith("bad") else 200, JSON)
        frames.data(msgspec.json.encode({"choices": [{"text": text}], "usage": self.usage}))
        frames.end(LegReport(prompt_tokens=9, completion_tokens=3))


def line(number: int, text: str = "", **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": text or f"p{number}"}
    return {"custom_id": f"c{number}", "method": "POST", "url": COMPLETIONS, "body": body, **fields}


def jsonl(*lines: Any) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in lines)


class Client:
    """One tenant at one router."""

    def __init__(self, router: Router, key: str = "") -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=router.edge),
            base_url="http://127.0.0.1/v1",
            headers={"x-api-key": key} if key else {},
        )

    async def call(self, method: str, path: str, **kw: Any) -> httpx.Response:
        return await self._http.request(method, path, **kw)

    async def get(self, path: str) -> dict[str, Any]:
        response = await self.call("GET", path)
        assert response.status_code == 200, response.text
        return response.json()

    async def upload(self, content: bytes, **fields: str) -> dict[str, Any]:
        response = await self.send(content, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def send(self, content: bytes, **fields: str) -> httpx.Response:
        form = {"purpose": "batch", **fields}
        return await self.call("POST", "/files", data=form, files={"file": ("in.jsonl", content)})

    async def batch(self, content: bytes, **fields: Any) -> dict[str, Any]:
        file = await self.upload(content)
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
        response = await self.call("POST", "/batches", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def until(self, batch_id: str, *statuses: str, poll_s: float = 0.5) -> dict[str, Any]:
        async with asyncio.timeout(UNTIL_S_MAX):
            while (batch := await self.get(f"/batches/{batch_id}"))["status"] not in statuses:
                await asyncio.sleep(poll_s)
        return batch

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        response = await self.call("GET", f"/files/{file_id}/content")
        assert response.status_code == 200, response.text
        return [msgspec.json.decode(one) for one in response.content.splitlines()]


ENDED = ("completed", "failed", "expired", "cancelled")


def run_with_engine(scenario: Callable[[World, Engine, Client], Awaitable[None]], **settings: Any) -> None:
    async def run(world: World) -> None:
        engine = Engine()
        await world.worker("w1", script=engine)
        await scenario(world, engine, Client(world.router, "a" if settings.keys() & {"keys", "keys_file"} else ""))

    run_in_world(run, **{**ON, **settings})


def with_engine(**settings: Any):
    return lambda test: as_test(test, lambda **kw: run_with_engine(functools.partial(test, **kw), **settings), given=3)


@asynccontextmanager
async def another_router(world: World, **settings: Any):
    """A second router of the system; it is lost at the end, unless it was closed before."""
    bus = MemoryBus(world.hub)
    router = Router(Settings(log_requests=False, **{**ON, **settings}), bus, LoopClock(), Tracing(None, LoopClock()))
    await router.open()
    tasks = asyncio.TaskGroup()
    async with tasks:
        router.start(tasks)
        while not router.fleet.ready(LoopClock().now()):
            await asyncio.sleep(0.1)
        yield router
        bus.lose()
        for task in list(tasks._tasks):
            task.cancel()
