"""A scripted OpenAI-compatible server, for what real ones do only when they fail, and a worker attached to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from services.worker.engines.attached.engine import start_engine
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.workers import WorkerPhase, WorkerRecord
from shared.runtime.service import live
from tests.support.memory_bus import MemoryHub
from tests.unit.worker.fakes import WAIT_S_MAX, RunningWorker

KEY = "sk-of-the-operator"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages")


class Asked(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def head(status: int = 200, content_type: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def says(
    body: bytes | dict | list, status: int = 200, content_type: str = "application/json", **headers: str
) -> Answer:
    """A whole answer, which ends with the connection."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, content_type, **headers) + raw)

    return answer


def streams(*events: bytes | dict) -> Answer:
    """Server-sent events, and then the end of the connection."""
    raw = [event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return says(b"".join(raw), content_type="text/event-stream; charset=utf-8")


def chunk(text: str = "", finish_reason: str | None = None, **more: Any) -> dict:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion.chunk", "model": "theirs", "choices": [choice], **more}


class FakeServer:
    """Answers each path with what the test has put there."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        """A client has closed its connection before the answer's end."""
        self.answers: dict[str, Answer] = {
            "/health": says(b""),
            "/v1/models": says({"data": [{"id": "theirs", "max_model_len": 512, "owned_by": "us"}]}),
            "/openapi.json": says({"paths": {key: {} for key in PATHS}}),
        }
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Listen, on the port of before if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    def posted(self, path: str = "/v1/chat/completions") -> list[Asked]:
        return [one for one in self.asked if one.method == "POST" and one.path == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            method, path, _version = request.split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            asked = Asked(method, path, headers, body)
            self.asked.append(asked)
            self.arrived.set()
            answer = self.answers.get(path, says(b"{}", 404))
            answering = asyncio.ensure_future(answer(asked, writer))
            leaving = asyncio.ensure_future(reader.read(1))
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left.set()
                answering.cancel()
            leaving.cancel()
            await asyncio.wait([answering, leaving])
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class AttachedWorker(RunningWorker):
    """Its engine is the real one, for the fake server."""

    async def start_engine(self, _settings, common, say, *, identity):
        return await start_engine(self.settings, common, say, identity=identity)

    async def until(self, phase: WorkerPhase, note: str = "") -> WorkerRecord:
        """The worker's record when it is in this phase, with this in its note."""
        records = await self.bus.key_value_store(WORKER_RECORDS)
        async with asyncio.timeout(WAIT_S_MAX):
            async for change in records.watch():
                if change and change.value and change.value.phase is phase and note in change.value.note:
                    return change.value
        raise AssertionError


@asynccontextmanager
async def server_and_worker(
    metrics: bytes | None = None, answers: dict[str, Answer] | None = None, **settings: Any
) -> AsyncIterator[tuple[FakeServer, AttachedWorker]]:
    """A ready worker, attached to a server that answers its probes. Ends both."""
    server = FakeServer()
    server.answers |= answers or {}
    if metrics is not None:
        server.answers["/metrics"] = says(metrics, content_type="text/plain")
    await server.open()
    worker = AttachedWorker(MemoryHub(), server)
    worker.settings = replace(worker.settings, engine="attached", attach_url=f"{server.url}/v1", **settings)
    await worker.inbox.open()
    worker.exit = asyncio.create_task(live(worker.service, worker.main, drain_s_max=WAIT_S_MAX))
    try:
        await worker.until(WorkerPhase.READY)
        yield server, worker
    finally:
        worker.service.stopping.set()
        await asyncio.wait([worker.exit], timeout=WAIT_S_MAX)
        await worker.inbox.close()
        await worker.bus.close()
        await server.close()
