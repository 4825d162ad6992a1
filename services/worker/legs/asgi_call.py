"""One call of the engine's ASGI app: a scope, a body to receive, and an answer that becomes frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.worker.engines.port import AsgiApp, AsgiMessage, LegRecord, Scope
from services.worker.legs.resume import dated
from shared.contracts.inference import LegKind, StartLeg

OK = 200
SERVER_ERROR = 500
JSON = "application/json"
LEAVE_S_MAX = 0.25
"""For the app to end what it began, once it knows that nobody waits."""


class Answer(Protocol):
    """Where an answer goes (see ``shared.bus.frame_sender.LegFrames``)."""

    def head(self, status: int, content_type: str) -> None:
        """First."""

    def data(self, data: bytes, token_ids: Sequence[int] = (), joined: list[int] | None = None) -> None:
        """Then any number."""

    async def drain(self) -> None:
        """Wait while the receiver is behind."""


class AsgiCall:
    """Feeds the app ``body`` and passes on what it answers.

    ``on_server_error`` runs before a 5xx answer is passed on: it may raise, so that an engine's death is told as such.
    A prefill leg's answer is kept back until ``finish``: with its KV ready, nobody needs the one token. Of a resumed
    leg's answer, what its client has had is dropped. What follows the last token (usage, the end of a stream, or that
    the engine died) goes with the leg's end or not at all: whoever takes it up knows by its tokens what was said.
    """

    def __init__(
        self,
        start: StartLeg,
        body: bytes,
        record: LegRecord,
        answer: Answer,
        on_server_error: Callable[[], Awaitable[None]],
    ) -> None:
        self.scope = http_scope(start.path, body, content_type=start.content_type, request_id=start.request_id)
        self.status = 0
        self._request: AsgiMessage | None = {"type": "http.request", "body": body, "more_body": False}
        self._record = record
        self._answer = answer
        self._on_server_error = on_server_error
        self._held_back: list[bytes] | None = [] if start.kind is LegKind.PREFILL else None
        self._tail: list[bytes] = []
        """Behind the last token."""
        self._content_type = ""
        self._created = start.created if start.resume is not None else 0
        self._left = asyncio.Event()

    async def run(self, app: AsgiApp) -> None:
        """Until the app has answered. Cancelled, the app learns that its client has gone, and ends what it began: were
        it cancelled itself, vLLM's server would go on with an answer that is not streamed, to its last token.
        """
        running = asyncio.ensure_future(app(self.scope, self.receive, self.send))
        try:
            await asyncio.shield(running)
        finally:
            if not running.done():
                self._left.set()
                await asyncio.wait([running], timeout=LEAVE_S_MAX)
                running.cancel()
            if running.done() and not running.cancelled():
                running.exception()  # of a client that has gone; any other was raised above

    async def receive(self) -> AsgiMessage:
        """The body, once; then nothing until the router has left."""
        if self._request is not None:
            request, self._request = self._request, None
            return request
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: AsgiMessage) -> None:
        """Status and headers, then pieces of the body."""
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._content_type = headers.get(b"content-type", b"application/json").decode("latin-1")
            if self.status >= SERVER_ERROR:
                await self._on_server_error()
            if self._held_back is None:
                self._answer.head(self.status, self._content_type)
        elif message["type"] == "http.response.body":
            await self._pass_on(bytes(message.get("body", b"")))

    def finish(self) -> None:
        """The app has returned: pass on what was kept back, if the router needs it."""
        if self._held_back is None:
            if tail := b"".join(self._tail):
                self._answer.data(tail)
            return
        succeeded = bool(self._record.kv_transfer) or self.status == OK
        self._answer.head(OK if succeeded else self.status, self._content_type)
        if not succeeded:
            self._answer.data(b"".join(self._held_back))

    async def _pass_on(self, data: bytes) -> None:
        if self._held_back is not None:
            self._held_back.append(data)
            return
        if self.status == OK and not self._record.sends_notifications:
            return
        data = dated(data, self._created) if self._created else data
        token_ids, joined = self._record.take_tokens()
        if self._record.is_over and not token_ids:
            self._tail.append(data)
            return
        if self._tail:
            data = b"".join([*self._tail, data])
            self._tail.clear()
        if data or token_ids:
            self._answer.data(data, token_ids, joined)
            await self._answer.drain()


async def ask_app(app: AsgiApp, path: str, body: bytes) -> tuple[int, bytes]:
    """A call that is no leg and makes no tokens: the status and the body of the app's answer to some JSON."""
    request: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]
    statuses, parts = [SERVER_ERROR], []

    async def receive() -> AsgiMessage:
        if request:
            return request.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        elif message["type"] == "http.response.body":
            parts.append(bytes(message.get("body", b"")))

    await app(http_scope(path, body), receive, send)
    return statuses[-1], b"".join(parts)


def http_scope(path: str, body: bytes, *, content_type: str = JSON, request_id: str = "") -> Scope:
    """The request as an HTTP server would describe it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"worker"),
            (b"content-type", content_type.encode("latin-1", "replace")),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": ("127.0.0.1", 0),
        "server": ("worker", 80),
        "state": {},
    }
