"""One call of the engine's ASGI app: a scope, a body to receive, and a response that becomes frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.worker.engines.port import AsgiApp, AsgiMessage, LegResult, Scope
from services.worker.legs.body import COMPLETION_PATHS, HANDOFF_PATHS
from services.worker.legs.resume import dated
from shared.contracts.engine_paths import METHODS
from shared.contracts.inference import LegKind, StartLeg

OK = 200
SERVER_ERROR = 500
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
LISTEN_S_MAX = 0.25
"""Time limit for the app to ask for the client's disconnect, or to end without."""
EVENT_PATHS = HANDOFF_PATHS - COMPLETION_PATHS
"""Paths whose server may send several events for one token, or none: a message's block begins and has a text, say."""
DISCONNECT_S_MAX = 5.0
"""Time limit for an app that has asked for the disconnect to end. It is longer than a busy event loop stalls: an app
that is cancelled before it has aborted its request leaves the engine to generate to the last token."""


class ResponseSink(Protocol):
    """Takes a response (see ``LegFrames``)."""

    def head(self, status: int, content_type: str) -> None:
        """Before any data."""

    def data(
        self,
        data: bytes,
        token_ids: Sequence[int] = (),
        joined: list[int] | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """A piece of the body, with the tokens that it tells of."""

    async def drain(self) -> None:
        """Wait while the router is behind."""


class _Call:
    """The app's side of a call: a body, and a disconnect when the caller does not wait any more."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.scope = scope
        self._request: AsgiMessage | None = {"type": "http.request", "body": body, "more_body": False}
        self._disconnected = asyncio.Event()
        self._has_listened = False

    async def run(self, app: AsgiApp) -> None:
        """Until the app has responded. On cancellation the app gets a disconnect, so that it aborts the request: if its
        task were cancelled instead, vLLM's server would generate a response that is not streamed to its last token.
        """
        running = asyncio.ensure_future(app(self.scope, self.receive, self.send))
        try:
            await asyncio.shield(running)
        finally:
            if not running.done():
                self._disconnected.set()
                try:
                    await asyncio.wait([running], timeout=LISTEN_S_MAX)
                    if self._has_listened and not running.done():
                        await asyncio.wait([running], timeout=DISCONNECT_S_MAX)
                finally:
                    running.cancel()
            if running.done() and not running.cancelled():
                running.exception()  # After a disconnect; any other exception was raised above.

    async def receive(self) -> AsgiMessage:
        """The body, once; then nothing until the disconnect."""
        if self._request is not None:
            request, self._request = self._request, None
            return request
        self._has_listened = True
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: AsgiMessage) -> None:
        """Status and headers, then pieces of the body."""
        raise NotImplementedError


class AsgiCall(_Call):
    """Gives the app ``body`` and relays its response.

    ``on_server_error`` runs before a 5xx response is relayed: it may raise, so that an engine's death is reported as
    such. A prefill leg's response is held back until ``finish``: once its KV is ready, its one token is not needed. A
    response that the server sends whole goes with the leg's end, in one message: the router passes it on only then. A
    resumed leg drops what its client has received. Output after the engine's last token (usage, the end of a stream, an
    error of a dying engine) is sent with the leg's end or not at all. That holds also when tokens have come of which
    the server has said nothing yet (half of a character). So the tokens sent say exactly where a leg that resumes must
    continue. For the same reason all events that tell of a token are sent as one.

    ``on_stream`` is called once, when the first token of a stream is sent or told of.
    """

    def __init__(
        self,
        start: StartLeg,
        body: bytes,
        response: ResponseSink,
        on_server_error: Callable[[], Awaitable[None]],
        on_stream: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            http_scope(start.path, body, content_type=start.content_type, request_id=start.request_id), body
        )
        self.status = 0
        self._joins_events = start.path in EVENT_PATHS
        self.result = LegResult(on_shown=self._shown if self._joins_events else None, caught_up=start.resume is None)
        self._response = response
        self._on_server_error = on_server_error
        self._on_stream = on_stream
        self._awaits_stream = False
        """Whether the response is a stream without a token so far."""
        self._is_stream = False
        self._tokens_before = self._told_before = 0  # At the last ``tell_of_tokens``: tokens generated, and those sent.
        self._held_back: list[bytes] | None = [] if start.kind is LegKind.PREFILL else None
        self._unsent: list[bytes] = []
        """Output that waits for more about the same tokens, or for the leg's end."""
        self._content_type = ""
        self._owes_head = False
        self._created = start.created if start.resume is not None else 0

    async def send(self, message: AsgiMessage) -> None:
        if self._disconnected.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._content_type = headers.get(b"content-type", b"application/json").decode("latin-1")
            if self.status >= SERVER_ERROR:
                await self._on_server_error()
            self._owes_head = self._held_back is None
            if self._content_type.startswith(EVENT_STREAM):
                self._is_stream = self._awaits_stream = self._owes_head and self.status == OK
                self._send_head()
        elif message["type"] == "http.response.body":
            data = bytes(message.get("body", b""))
            if self._owes_head and not message.get("more_body", False):
                self._unsent.append(data)
                return
            self._send_head()
            await self._relay(data)

    def _send_head(self) -> None:
        if self._owes_head:
            self._owes_head = False
            self._response.head(self.status, self._content_type)

    def finish(self) -> None:
        """The app has returned: relay what was held back, if the router needs it."""
        if self._held_back is None:
            self._send_head()
            if data := b"".join(self._unsent):
                self._response.data(data, *self.result.take_tokens(), self.result.take_cached())
            return
        succeeded = bool(self.result.kv_transfer) or self.status == OK
        self._response.head(OK if succeeded else self.status, self._content_type)
        if not succeeded:
            self._response.data(b"".join(self._held_back))

    async def _relay(self, data: bytes) -> None:
        if self._held_back is not None:
            self._held_back.append(data)
            return
        if self.status == OK and not self.result.is_new_to_client:
            return
        data = dated(data, self._created) if self._created else data
        if self._joins_events:
            self._unsent.append(data)
            return
        if self.result.is_over:
            self._unsent.append(data)
            return
        token_ids, joined = self.result.take_tokens()
        if self._unsent:
            data = b"".join([*self._unsent, data])
            self._unsent.clear()
        if data or token_ids:
            if self._awaits_stream:
                self._stream_begins()
            self._response.data(data, token_ids, joined, self.result.take_cached())
            await self._response.drain()

    async def _shown(self) -> None:
        """The server asks for its next tokens. Those of which it has said nothing yet go with its next event."""
        if data := b"".join(self._unsent):
            self._unsent.clear()
            if self._awaits_stream:
                self._stream_begins()
            self._response.data(data, *self.result.take_tokens(), self.result.take_cached())
            await self._response.drain()

    def tell_of_tokens(self, *, paused: bool = False) -> None:
        """Called about once a second: if tokens of a stream have come since the last call, and the server has said
        nothing of any, the router gets an empty frame. It would take the engine for silent. So it does for a stream
        that has begun while the engine is ``paused``.
        """
        result = self.result
        tokens = result.completion_tokens
        told = tokens - len(result.token_ids)
        before, told_before = self._tokens_before, self._told_before
        self._tokens_before, self._told_before = tokens, told
        is_open = self._is_stream and not result.is_over and result.is_new_to_client
        is_kept = paused and not self._awaits_stream
        is_unseen = tokens > before and told == told_before
        if is_open and (is_unseen or is_kept) and not self._disconnected.is_set():
            if self._awaits_stream:
                self._stream_begins()
            self._response.data(b"")

    def _stream_begins(self) -> None:
        self._awaits_stream = False
        self._on_stream()


class _Ask(_Call):
    """Keeps the whole response."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        super().__init__(scope, body)
        self.status = SERVER_ERROR
        self.parts: list[bytes] = []

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.parts.append(bytes(message.get("body", b"")))


async def ask_app(app: AsgiApp, path: str, body: bytes) -> tuple[int, bytes]:
    """A call with a JSON body that is no leg: returns the status and the body of the response. On cancellation the app
    gets a disconnect.
    """
    ask = _Ask(http_scope(path, body), body)
    await ask.run(app)
    return ask.status, b"".join(ask.parts)


def http_scope(path: str, body: bytes, *, content_type: str = JSON, request_id: str = "") -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": METHODS.get(path, "POST"),
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
