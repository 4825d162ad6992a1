"""One client connection: uvicorn's protocol, with some paths served without ASGI.

The router serves the paths that it relays without ASGI: each ASGI message and event would cost more than a placement.
All other requests, and all of the metrics collector's, go through uvicorn to the edge's app.

Invariants that a change must keep:

* Responses leave in the order of the requests. ``cycle`` is the newest request of the connection, ``serving`` the
  direct one whose response is written now; the requests between them wait in uvicorn's ``pipeline``.
* Bytes that could be read in two ways are refused, and nothing that follows them is parsed: a proxy in front of the
  server may have read them the other way, and would take the response to a smuggled request for another client's
  (request smuggling). llhttp, the parser, refuses what contradicts itself (Content-Length with Transfer-Encoding, two
  lengths, bare LF, folded headers); the rest is decided here. ``lenient_data_after_close``, which uvicorn sets too,
  is the only leniency: bytes after a request with ``Connection: close`` are ignored instead of an error.
* All that one client can make the server hold has a limit: the head, the framing of chunks, trailers, pipelined
  requests (reading pauses), unread responses (``held``), and the time for each of them (``IdleClients``).

* A request that arrives whole, in one read and in the usual form, is read without the parser (``_take_whole``), which
  then is where it was: between two requests.

Traps: uvicorn calls ``on_response_complete`` for ASGI requests only, so ``answered`` calls it for direct ones.
uvicorn's ``connection_lost`` tells only the newest cycle, so this one tells the one that is served and all that wait.
An exception that is raised in a parser callback arrives as the ``__context__`` of an HttpParserError. llhttp keeps its
state after an error, so ``last_text`` also means that nothing more may be fed to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import httptools
from httptools import HttpRequestParser
from mypy_extensions import mypyc_attr
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from shared.http.edge import DirectRequest, HttpEdge, plain_path
from shared.http.errors import Header, HttpError, error_body
from shared.http.limits import UNNAMED

HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
HEAD_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
NOT_HTTP: Final = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_BODY: Final = HttpError(
    400, error_body(400, "The body does not match its headers."), reason="bad_request", closes=True
)

NOTHING: Final[Mapping[bytes, str]] = {}
UPGRADE_HEADERS: Final = frozenset({b"upgrade", b"http2-settings"})


class _NoTrailers:
    def append(self, _header: Header) -> None:
        """Drop it. A trailer such as Content-Length or Authorization must not count as a header, and a client may send
        any number of them.
        """


NO_TRAILERS: Final[Any] = _NoTrailers()
"""Takes the place of the header list after the head."""


class TooManyHeaders(Exception):
    """Raised in a parser callback: httptools wraps it in an HttpParserError."""


def head_without_upgrade(parser: HttpRequestParser, url: bytes, headers: list[Header]) -> bytes:
    """The head of a request without its offer to upgrade. ``Connection: close`` is kept."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            lines += [b"connection: close"] if b"close" in value.lower() else []
        elif name not in UPGRADE_HEADERS:
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


class PipelinedRequest:
    """A direct request among the requests of its connection, with the attributes that uvicorn uses of a cycle."""

    __slots__ = ("disconnected", "http_request", "message_event")

    def __init__(self, http_request: DirectRequest) -> None:
        self.http_request = http_request
        self.disconnected = False
        self.message_event = NO_EVENT

    @property
    def response_complete(self) -> bool:
        """Whether the next request may be served."""
        return self.http_request.ended


class _NoEvent:
    def set(self) -> None:
        """Do nothing. uvicorn wakes its ASGI task by this event; such a request has ``client_left`` instead."""


NO_EVENT: Final = _NoEvent()


HEAD_BYTES_MAX: Final = 64 * 1024
"""Request line and headers; a larger head is answered with 431 and the connection is closed."""
HEADERS_MAX: Final = 256
"""Headers of one request; more are answered with 431 too. Thousands of tiny headers fit into ``HEAD_BYTES_MAX``, and
each costs a Python call."""
FRAMING_BYTES_MAX: Final = 8 * HEAD_BYTES_MAX
FRAMING_RATIO_MAX: Final = 8
"""Bytes around a chunked body that are allowed: a fixed number, and this many for each byte of the body. llhttp limits
neither chunk extensions nor trailers, so that a client could otherwise send them for ever.
"""


@mypyc_attr(native_class=False)  # Its base is not compiled.
class EdgeProtocol(HttpToolsProtocol):
    """One client connection."""

    __slots__ = (
        "body_bytes",
        "counted",
        "cycle",
        "edge",
        "flow",
        "held",
        "http_request",
        "in_head",
        "last_text",
        "pipeline",
        "request_bytes",
        "server_state",
        "serving",
        "started",
        "transport",
    )
    """What each request reads. All else, its base's attributes above all, lies in a dictionary, which takes longer to
    read.
    """

    app: Any
    """The edge, which ``make_server`` passes to uvicorn as the ASGI app."""
    cycle: Any
    """The newest request: uvicorn's cycle, or a PipelinedRequest."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.edge: HttpEdge[Any] = self.app
        self.http_request: DirectRequest | None = None
        """The newest request if it is served without ASGI; its body may still be arriving."""
        self.serving: DirectRequest | None = None
        """The direct request whose response is written; later ones of the connection wait in ``pipeline``."""
        self.started: Any = None
        """The newest cycle that is or was served; those after it wait in ``pipeline``."""
        self.in_head = False
        self.request_bytes = 0
        self.body_bytes = 0
        """Bytes of the present request so far, at most (one read may also hold others); and its body's share of them.
        """
        self.counted = False
        """False when the connection was refused: there were too many."""
        self.held = False
        """The next request waits until the client has read the responses. Without this a client that pipelines requests
        and does not read would fill the server's memory with responses.
        """
        self.last_text: bytes | None = None
        """Set when the input was invalid: it is ignored from then on. The text is written after the responses to
        earlier requests, then the connection closes.
        """

    def data_received(self, data: bytes) -> None:
        if self.last_text is not None or not self.counted:
            return
        self.edge.idle.asks(self)
        if not (self.request_bytes or self.in_head or self.busy) and self._take_whole(data):
            return
        self.request_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._end_with(HEAD_TOO_LARGE if isinstance(error.__context__, TooManyHeaders) else NOT_HTTP)
            return
        http_request = self.http_request
        if self.in_head:
            if self.request_bytes > HEAD_BYTES_MAX:
                self._end_with(HEAD_TOO_LARGE)
                return
            self.edge.idle.waits_for_head(self)
        elif self.request_bytes > FRAMING_BYTES_MAX + FRAMING_RATIO_MAX * self.body_bytes:
            self._end_with(NOT_HTTP)
        elif http_request is not None and not http_request.upload.complete:
            self.edge.uploads.add(http_request)
        elif (http_request is None or http_request.ended) and not self.busy:
            self.edge.idle.waits_for_head(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; refuse one too many."""
        super().connection_made(transport)
        socket = transport.get_extra_info("socket")
        descriptor = socket.fileno() if socket is not None else -1
        lacks_descriptors = self.edge.descriptors.lack(descriptor, self.edge.connections.count)
        address = self.client[0] if self.client else UNNAMED
        if self.edge.connections.enter(self, address, is_full=lacks_descriptors):
            self.counted = True
            self.edge.idle.waits_for_head(self)
            return
        self.edge.refused_connection("no_descriptors" if lacks_descriptors else "too_many_connections")
        self.write(TOO_MANY)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client has left."""
        super().connection_lost(exc)
        self.edge.idle.left(self)
        self.edge.connections.leave(self)
        if self.started is not None:  # An app that waits in ``receive`` gets ``http.disconnect``.
            self.started.disconnected = True
            self.started.message_event.set()
        cycles = [self.cycle, *[cycle for cycle, _app in self.pipeline]]
        http_requests = {cycle.http_request for cycle in cycles if isinstance(cycle, PipelinedRequest)}
        for http_request in http_requests | ({self.serving} if self.serving is not None else set()):
            http_request.client_left()
            self.edge.uploads.discard(http_request)

    def _take_whole(self, data: bytes) -> bool:
        """Whether ``data`` is a whole request that need not be parsed: see ``PlainRequests``."""
        edge = self.edge
        plain = edge.plain_requests.read(data)
        if plain is None:
            return False
        path, headers, body = plain
        edge.idle.head_came(self)
        http_request = self.http_request = edge.admit(self, path, headers, http11=True, keep=True)
        self.cycle = self.started = PipelinedRequest(http_request)
        self.serving = http_request
        http_request.is_current = True
        if http_request.refusal is None:
            http_request.upload.add(body)
            edge.limit_body(http_request, len(body))
        http_request.upload.complete = True
        self._advance(http_request)
        if http_request.ended and not self.busy:
            edge.idle.waits_for_head(self)
        return True

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's HttpClient offers an upgrade to HTTP/2 with every request. llhttp ends such a request after its
            # head and leaves the body unparsed, so the same request is parsed again without the offer. A second offer
            # in one read can only be a pipelined one, which no real client sends.
            head = head_without_upgrade(self.parser, self.url, self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            try:
                self.parser.feed_data(head + data[upgrade.args[0] :])
            except httptools.HttpParserUpgrade as again:
                raise httptools.HttpParserError("two upgrade offers in one read") from again

    def _end_with(self, text: bytes) -> None:
        """The input is invalid. Earlier requests get their responses first, or ``text`` would pass for one of them."""
        http_request = self.http_request
        if http_request is not None and not http_request.upload.complete:  # The error is in this request's body.
            self.last_text = b""
            self.edge.uploads.discard(http_request)
            if http_request.ended:
                self.transport.close()
            else:
                http_request.refusal = BAD_BODY
                self._advance(http_request)
        elif self.busy and (self.in_head or http_request is not None):
            self.last_text = text
        else:
            self.last_text = b"" if self.busy else text
            self._say_last()

    def _say_last(self) -> None:
        self.write(self.last_text or b"")
        self.transport.close()
        self.edge.idle.waits_for_reader(self)

    def on_message_begin(self) -> None:
        """A new request."""
        self.in_head = True
        self.http_request = None
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        """The head is complete: serve the request directly, or leave it to the app."""
        self.in_head = False
        if self.parser.should_upgrade():
            return  # ``_parse`` parses it again.
        if len(self.headers) > HEADERS_MAX:
            raise TooManyHeaders
        self.edge.idle.head_came(self)
        # llhttp reports trailers with the same callback as headers: they must not become headers of this request.
        headers, self.headers = self.headers, NO_TRAILERS
        path, _, query = self.url.partition(b"?")
        served = self._served(path)
        if served is None:
            self._begin_asgi(headers)
            return
        http11 = self.parser.get_http_version() == "1.1"
        keep = http11 and self.parser.should_keep_alive()  # HTTP/1.0 is always closed: it cannot delimit a stream.
        http_request = self.http_request = self.edge.admit(self, served, headers, http11=http11, keep=keep, query=query)
        before, self.cycle = self.cycle, PipelinedRequest(http_request)
        if (before is None or before.response_complete) and not self.held:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _begin_asgi(self, headers: list[Header]) -> None:
        """Leave the request to the app. uvicorn makes the scope as a request begins; here that is known only now."""
        url, expects = self.url, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # The list in the scope.
        super().on_headers_complete()
        self.headers = NO_TRAILERS

    def _served(self, path: bytes) -> str | None:
        """The path, if the edge serves it without the app."""
        method = self.parser.get_method()
        served = self.edge.paths if method == b"POST" else self.edge.gets if method == b"GET" else NOTHING
        return served.get(path) or served.get(plain_path(path.decode("latin-1")).encode("latin-1"))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.started = cycle
        if not isinstance(cycle, PipelinedRequest):
            super()._start_asgi_task(cycle, app)
            return
        self.serving = cycle.http_request
        cycle.http_request.is_current = True
        if self.expect_100_continue and cycle.http_request.refusal is None and not cycle.http_request.upload.complete:
            self.transport.write(CONTINUE)
        self._advance(cycle.http_request)

    def on_body(self, body: bytes) -> None:
        """A piece of the body. Pieces of a refused request are dropped."""
        self.body_bytes += len(body)
        http_request = self.http_request
        if http_request is None:
            super().on_body(body)
        elif http_request.refusal is None:
            http_request.upload.add(body)
            if self.edge.limit_body(http_request, http_request.upload.size):
                self._advance(http_request)

    def on_message_complete(self) -> None:
        self.request_bytes = self.body_bytes = 0
        if self.parser.should_upgrade():
            return
        http_request = self.http_request
        if http_request is None:
            super().on_message_complete()
            return
        http_request.upload.complete = True
        self.edge.uploads.discard(http_request)
        self._advance(http_request)

    def _advance(self, http_request: DirectRequest) -> None:
        if not http_request.is_current or http_request.ended:
            return
        if http_request.refusal is not None:
            http_request.refuse(http_request.refusal)
        elif http_request.upload.complete:
            self.edge.begin(http_request)

    def on_response_complete(self) -> None:
        """Serve the next request, once the client has read its responses. Reading pauses while pipelined ones wait."""
        if self.flow.write_paused or self.transport.is_closing():
            self.held = True
            self.flow.pause_reading()
            self.edge.idle.waits_for_reader(self)
            return
        if self.last_text is not None and not self.pipeline:
            self._say_last()
            return
        self.server_state.total_requests += 1
        if self.flow.read_paused:
            self.flow.resume_reading()
        if not self.pipeline:
            self.edge.idle.rests(self)
            return
        cycle, app = self.pipeline.pop()
        self._start_asgi_task(cycle, app)
        if self.pipeline:
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        """The write buffer is full: the client has ``read_s_max`` to read."""
        super().pause_writing()
        self.edge.idle.waits_for_reader(self)

    def resume_writing(self) -> None:
        """The client has read most of the write buffer."""
        super().resume_writing()
        self.edge.idle.has_read(self)
        if self.held and not self.transport.is_closing():
            self.held = False
            self.on_response_complete()

    def shutdown(self) -> None:
        """Shutting down: close the connection after the running response."""
        if self.serving is not None and not self.serving.ended:
            self.serving.close_after()
        elif isinstance(self.cycle, PipelinedRequest) and not self.cycle.response_complete:
            self.cycle.http_request.close_after()
        else:
            super().shutdown()

    @property
    def busy(self) -> bool:
        """Whether a request is being served or waits to be."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing is served: the client must send or read first."""
        if not self.busy:
            return True
        if self.in_head or self.pipeline:  # ``cycle`` is not the request that is served.
            return False
        cycle = self.cycle
        return not cycle.http_request.upload.complete if isinstance(cycle, PipelinedRequest) else bool(cycle.more_body)

    def unsent_bytes(self) -> int:
        """Bytes in the socket's write buffer."""
        return self.transport.get_write_buffer_size()

    def head_is_late(self) -> None:
        """No complete head came in time. A client that has begun one gets a 408."""
        if self.in_head:
            self.transport.write(HEAD_TOO_SLOW)
            self.transport.close()
            self.edge.idle.waits_for_reader(self)
        else:
            self.transport.abort()

    def reader_is_late(self) -> None:
        """The client does not read. ``connection_lost`` cancels its legs."""
        if self.serving is not None:
            self.serving.slow = True
        self.transport.abort()

    def make_room(self) -> None:
        """Another client needs the place."""
        self.edge.refused_connection("connection_displaced")
        self.transport.abort()

    def rest_is_over(self) -> None:
        """The keep-alive time is over. Abort when the client has not read its last response: ``close`` would wait for
        it.
        """
        if self.unsent_bytes():
            self.transport.abort()
        else:
            self.transport.close()

    def common_headers(self) -> bytes:
        """The header lines that each response has."""
        return self.edge.date_line

    def write(self, data: bytes) -> None:
        """Write to the socket, unless it is closing."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def write_paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client has caught up."""
        await self.flow.drain()

    def answered(self, *, close: bool) -> None:
        if close:
            self.transport.close()
        self.on_response_complete()

    def abort(self) -> None:
        self.transport.abort()
