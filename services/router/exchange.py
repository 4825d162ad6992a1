"""The client's side of one request, over raw ASGI: read the body within its bounds, answer whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from services.router.core.request import Mode
from services.router.http_answers import HttpError
from shared.contracts.ids import RequestId, is_subject_token

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

Header = tuple[bytes, bytes]

MODES = {mode.value.encode(): mode for mode in Mode}


class ClientGone(Exception):
    """The client left before its body was read."""


class BodyTooLarge(Exception):
    """The body is beyond the limit."""


class BodyTooSlow(Exception):
    """The body did not come in time."""


class Exchange:
    """One request and its answer. ``begun``: some of the answer was handed to the client."""

    __slots__ = (
        "_receive",
        "_send",
        "begun",
        "body",
        "content_type",
        "ended",
        "length",
        "mode",
        "path",
        "request_id",
        "trace",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, new_id: Callable[[], str]) -> None:
        self._receive = receive
        self._send = send
        self.path: str = scope["path"]
        self.body = b""
        self.begun = False
        self.ended = False
        self.mode: Mode | None = Mode.AUTO
        """None when the header asks for something that does not exist."""
        self.content_type = "application/json"
        self.length = -1
        """The body's length as announced; -1 when it was not."""
        self.trace: dict[str, str] | None = None
        """The client's W3C trace context."""
        request_id = ""
        for name, value in scope["headers"]:
            if name == b"content-length":
                self.length = int(value)
            elif name == b"content-type":
                self.content_type = value.decode("latin-1")
            elif name in (b"traceparent", b"tracestate"):
                self.trace = {**(self.trace or {}), name.decode(): value.decode("latin-1")}
            elif name == b"x-request-id":
                request_id = value.decode("latin-1")
            elif name == b"x-baton-mode":
                self.mode = MODES.get(value.strip().lower())
        self.request_id = RequestId(request_id if request_id and is_subject_token(request_id) else new_id())

    async def read(self, bytes_max: int, s_max: float) -> None:
        """Fill ``body``. Raises BodyTooLarge, BodyTooSlow, ClientGone."""
        if self.length > bytes_max:
            raise BodyTooLarge
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.body = message.get("body", b"")
        if message.get("more_body", False):
            try:
                async with asyncio.timeout(s_max):
                    await self._read_on(bytes_max)
            except TimeoutError:
                raise BodyTooSlow from None
        elif len(self.body) > bytes_max:
            raise BodyTooLarge

    async def _read_on(self, bytes_max: int) -> None:
        parts, size, more = [self.body], len(self.body), True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > bytes_max:
                raise BodyTooLarge
            more = message.get("more_body", False)
        self.body = b"".join(parts)

    async def wait_left(self) -> None:
        """Return when the client has left, or the answer is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """A whole answer at once."""
        self.begun = self.ended = True
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: HttpError, *, close: bool = False) -> None:
        """An error of the router's own. ``close`` ends the connection too: there may be more body to come."""
        headers = [*error.headers(), (b"x-request-id", self.request_id.encode())]
        if close:
            headers.append((b"connection", b"close"))
        await self.answer(error.status, headers, error.body)

    async def begin(self, status: int, headers: list[Header]) -> None:
        """The head of a stream."""
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        """A piece of a stream; waits while the client's buffer is full."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last piece of a stream."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})
