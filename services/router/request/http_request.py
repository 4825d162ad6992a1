"""The client's side of one request: its head, its body, and its response, whole or as a stream.

A request writes its response to the connection itself, head and first data in one write: for short requests ASGI's
messages would cost more than everything else that the router does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.router.request.errors import (
    BUG,
    MESSAGES_PING,
    PING,
    error_event,
    error_for,
    failed,
    is_anthropic,
    late_response,
)
from services.router.request.head import Head
from shared.contracts.failures import Reason
from shared.contracts.request_body import BYTE_ORDER_MARK
from shared.http.errors import Header, HttpError

OBJECT_BYTES: Final = 64
"""Memory of a piece of a body besides its bytes."""
CHUNKED: Final = b"transfer-encoding: chunked\r\n"
HEAD_END: Final = b"\r\n"
CLOSING_HEAD_END: Final = b"connection: close\r\n\r\n"
UNPRINTABLE: Final = b"unprintable"


def header_lines(headers: Iterable[Header]) -> bytes:
    """Headers as they stand in a response, with their line ends."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def header_value(text: str) -> bytes:
    """Text from a worker as a response header. It must not contain CR or LF: they would begin another header."""
    return text.encode() if text.isascii() and text.isprintable() else UNPRINTABLE


class Connection(Protocol):
    """What a request uses of its connection."""

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket, or to its buffer."""

    def write_paused(self) -> bool:
        """Whether the write buffer is full, because the client reads too slowly."""

    async def drain(self) -> None:
        """Wait until the client has caught up or left."""

    def common_headers(self) -> bytes:
        """The header lines that each response has."""

    def answered(self, *, close: bool) -> None:
        """The response is complete: the connection closes, or takes the next request."""

    def abort(self) -> None:
        """Drop the connection with its unsent bytes."""


OK: Final = 200
WITHOUT_BODY: Final = (204, 304)
"""Statuses whose responses end with their head."""


class NoConnection:
    """The connection of a request that has no client: nothing is written to it."""

    def write(self, data: bytes) -> None: ...

    def write_paused(self) -> bool:
        return False

    async def drain(self) -> None: ...

    def common_headers(self) -> bytes:
        return b""

    def answered(self, *, close: bool) -> None: ...

    def abort(self) -> None: ...


class UploadTotals:
    """Memory of all bodies, and of what is made of them, for requests without a complete response."""

    __slots__ = ("bytes_held",)

    def __init__(self) -> None:
        self.bytes_held = 0


class Upload:
    """A request's body as it arrives."""

    __slots__ = ("_held", "_parts", "begun_at", "complete", "size", "totals")

    def __init__(self, begun_at: float, totals: UploadTotals) -> None:
        self.totals = totals
        self._held = 0
        self._parts: list[bytes] = []
        self.size = 0
        self.begun_at = begun_at
        self.complete = False

    def replaced(self, body: bytes) -> Upload:
        """A complete body in the place of this one, of the same totals."""
        upload = Upload(self.begun_at, self.totals)
        upload.add(body)
        upload.complete = True
        return upload

    def add(self, data: bytes) -> None:
        self._parts.append(data)
        self.size += len(data)
        self.hold(len(data) + OBJECT_BYTES)

    def hold(self, size: int) -> None:
        """So many bytes more are in memory for this body; a negative number releases them."""
        self._held += size
        self.totals.bytes_held += size

    def has_mark(self) -> bool:
        """Whether the body begins with a byte order mark. One that is torn over two pieces counts as none."""
        return bool(self._parts) and self._parts[0].startswith(BYTE_ORDER_MARK)

    def over(self) -> None:
        """The body is no longer needed."""
        self.totals.bytes_held -= self._held
        self._held = 0
        self._parts = []

    def body(self) -> bytes:
        """What has arrived so far."""
        if len(self._parts) > 1:
            self.hold(-OBJECT_BYTES * (len(self._parts) - 1))
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""


class HttpRequest:
    """One request and its response."""

    __slots__ = (
        "_connection",
        "_keep_alive",
        "_unsent_head",
        "begun",
        "ended",
        "head",
        "is_current",
        "is_early",
        "left",
        "on_left",
        "page_headers",
        "refusal",
        "slow",
        "upload",
    )

    def __init__(self, connection: Connection, head: Head, upload: Upload, *, http11: bool, keep_alive: bool) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self._unsent_head = b""
        self.page_headers = b""
        """Header lines with which a page of another site may read the response."""
        self.head = head
        head.http11 = http11
        self.upload = upload
        self.is_current = False
        """Earlier requests of the same connection have their responses: this one may be served."""
        self.refusal: HttpError | None = None
        """An error that was decided before the body was complete."""
        self.begun = False
        """The response's head is decided, and written at the latest with the first data."""
        self.is_early = False
        """The head of a stream was written before it was known what the response is (see ``ping``)."""
        self.ended = False
        """The response is complete."""
        self.left = False
        """The client has disconnected."""
        self.slow = False
        """The router disconnected the client because it did not read in time."""
        self.on_left: list[Callable[[], None]] = []
        """Called when the client disconnects before its response is complete. Each layer that waits for this request
        appends its own callback and removes it when it is done.
        """

    def client_left(self) -> None:
        """The client has disconnected: its connection is lost (``shared/http/protocol.py``), or was dropped because the
        client did not read in time (``slow``).

        ``on_left`` ends every wait of the request: ``RequestContext.client_left`` stops the attempt's legs, here and at
        their workers; ``AdmissionQueue.wait`` leaves the queue; ``BusHealth.pause`` and the wait for a tokenizing
        thread end; ``Responses`` passes it on to the request that it made of this one. The request then takes its
        usual way to the end: ``Retry.next_attempt`` makes no further attempt, and ``Relay`` sends nothing, notes
        status 499 and accounts for what was used.
        """
        self.left = True
        if not (self.upload.complete and self.is_current):  # One that is being served keeps its body until its end.
            self.upload.over()
        if not self.ended:
            for callback in tuple(self.on_left):
                callback()

    def replace_body(self, body: bytes) -> None:
        """Another complete body takes the place of the one that came."""
        upload = self.upload
        self.upload = upload.replaced(body)
        upload.over()

    def hold(self, size: int) -> None:
        """So many bytes more are in memory for this request; a negative number releases them."""
        self.upload.hold(size)

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole response. ``headers``: see ``header_lines``."""
        if self.is_early:
            self.end(late_response(self.head.path, status, body))
            return
        if status in WITHOUT_BODY:  # A client takes a body for the beginning of the next response.
            body, length = b"", b""
        else:
            length = f"content-length: {len(body)}\r\n".encode()
        self._begin(status, headers, length)
        self._connection.write(self._unsent_head + body)
        self._end()

    def refuse(self, error: HttpError, more: Iterable[Header] = ()) -> None:
        """Send an error of the router's own."""
        if error.closes:
            self._keep_alive = False
        if self.is_early:
            self.answer(error.status, b"", error.body)
            return
        error = error_for(self.head.path, error, self.head.request_id)
        headers = [*error.headers(), (b"x-request-id", self.head.request_id.encode()), *more]
        self.answer(error.status, header_lines(headers), error.body)

    def crash(self) -> None:
        """End the response because of a bug, unless it has ended or the client has left."""
        if self.left or self.ended:
            return
        if self.begun:
            self.end(error_event(self.head.path, Reason.INTERNAL, BUG))
        else:
            self.refuse(failed(Reason.INTERNAL, BUG))

    def begin(self, status: int, headers: bytes) -> None:
        """Begin a stream. Its head is written with the first data, unless ``ping`` has written one."""
        if self.is_early:
            self.begun = True
            return
        if not self.head.http11:
            self._keep_alive = False
        self._begin(status, headers, CHUNKED if self.head.http11 else b"")

    def ping(self, headers: bytes) -> None:
        """Show that more of a stream will come. If nothing has been sent, a head with these headers goes before, while
        ``begun`` stays False: what the response is may still change, but not its status.
        """
        if not self.begun and not self.is_early:
            self.begin(OK, headers)
            self.begun, self.is_early = False, True
        self.send(MESSAGES_PING if is_anthropic(self.head.path) else PING)

    def is_blocked(self) -> bool:
        """Whether the client reads too slowly: a stream's next piece should wait for ``drained``."""
        return self._connection.write_paused()

    async def drained(self) -> None:
        """Wait until the client has caught up or left."""
        await self._connection.drain()

    def send(self, data: bytes) -> None:
        """Send a piece of a stream."""
        if not self.left:
            self._connection.write(self._framed(data))
            self._unsent_head = b""

    def end(self, data: bytes = b"") -> None:
        """Send the last piece of a stream."""
        framed = self._framed(data) if data else self._unsent_head
        self._connection.write(framed + b"0\r\n\r\n" if self.head.http11 else framed)
        self._end()

    def close_after(self) -> None:
        self._keep_alive = False

    def abort(self) -> None:
        self._connection.abort()

    def _framed(self, data: bytes) -> bytes:
        return (
            b"%b%x\r\n%b\r\n" % (self._unsent_head, len(data), data) if self.head.http11 else self._unsent_head + data
        )

    def _begin(self, status: int, headers: bytes, framing: bytes) -> None:
        self.begun = True
        end = HEAD_END if self._keep_alive else CLOSING_HEAD_END
        common = self._connection.common_headers()
        self._unsent_head = STATUS_LINE[status] + common + headers + self.page_headers + framing + end

    def _end(self) -> None:
        self.ended = True
        self.upload.over()
        self._connection.answered(close=not self._keep_alive)
