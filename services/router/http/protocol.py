"""One client connection: uvicorn's protocol, with the relayed paths served without ASGI.

ASGI's messages and events would each cost more than placement. Everything else goes the usual way, to FastAPI.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.http import pipelining
from services.router.http.edge import RELAYED, Edge
from services.router.http.pipelining import PipelinedRequest, TooManyHeaders, head_without_upgrade
from services.router.http.request import HttpRequest

HEAD_BYTES_MAX = 64 * 1024
"""Request line and headers; a larger head is answered with 431 and the connection is closed."""
HEADERS_MAX = 256
"""Of one request; more are answered with 431 too."""
FRAMING_BYTES_MAX = 8 * HEAD_BYTES_MAX
FRAMING_RATIO_MAX = 8
"""What may stand around a body in chunks: so many bytes, and for each of the body so many more."""
UNNAMED = "-"
"""The address of whoever comes without one, by a Unix socket for instance."""
PATHS = {path.encode(): path for path in RELAYED}


class RouterProtocol(HttpToolsProtocol):
    """One client connection."""

    app: Any
    """What ``make_server`` gave to uvicorn: the edge."""
    cycle: Any
    """uvicorn's cycle, or an http_request's place in the connection's order of requests."""
    http_request: HttpRequest | None = None
    """The relayed request whose body comes, or whose answer goes, just now."""
    serving: HttpRequest | None = None
    """The relayed request whose turn it is; later ones of the same connection wait in ``pipeline``."""
    in_head = False
    request_bytes = 0
    body_bytes = 0
    """Of the present request so far, at most; and of these, its body."""
    address = ""
    """Whose connection it is; empty when it was not let in."""
    held = False
    """The next request waits until the client has read what was answered."""
    last_text: bytes | None = None
    """What is said, before the connection closes, when all that was asked before has been answered."""

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.last_text is not None or not self.address:
            return
        self._unset_keepalive_if_required()
        self.request_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._end_with(
                pipelining.HEAD_TOO_LARGE if isinstance(error.__context__, TooManyHeaders) else pipelining.NOT_HTTP
            )
            return
        http_request = self.http_request
        if self.in_head:
            if self.request_bytes > HEAD_BYTES_MAX:
                self._end_with(pipelining.HEAD_TOO_LARGE)
                return
            self.edge.idle.waits_for_head(self)
        elif self.request_bytes > FRAMING_BYTES_MAX + FRAMING_RATIO_MAX * self.body_bytes:
            self._end_with(pipelining.NOT_HTTP)
        elif http_request is not None and not http_request.upload.complete:
            self.edge.uploads.add(http_request)
        elif (http_request is None or http_request.ended) and not self.busy:
            self.edge.idle.waits_for_head(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        self.edge: Edge = self.app
        super().connection_made(transport)
        address = self.client[0] if self.client else UNNAMED
        if self.edge.connections.enter(address):
            self.address = address
            self.edge.idle.waits_for_head(self)
            return
        self.edge.refused_connection()
        self.write(pipelining.TOO_MANY)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, and with it everybody who waits for answers on this connection."""
        super().connection_lost(exc)
        self.edge.idle.left(self)
        if self.address:
            self.edge.connections.leave(self.address)
        cycles = [self.cycle, *[cycle for cycle, _app in self.pipeline]]
        http_requests = {cycle.http_request for cycle in cycles if isinstance(cycle, PipelinedRequest)}
        for http_request in http_requests | ({self.serving} if self.serving is not None else set()):
            http_request.client_left()
            self.edge.uploads.discard(http_request)

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's client offers HTTP/2 with every request. The parser skips the body of such a request, so it is
            # read once more as what it is without the offer. One in each read is plenty.
            head = head_without_upgrade(self.parser, self.url, self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            try:
                self.parser.feed_data(head + data[upgrade.args[0] :])
            except httptools.HttpParserUpgrade as again:
                raise httptools.HttpParserError("two offers at once") from again

    def _end_with(self, words: bytes) -> None:
        """Nothing more is understood. What was asked before is answered first: these words are no answer to that."""
        http_request = self.http_request
        if (
            http_request is not None and not http_request.upload.complete
        ):  # It is the end of this one that makes no sense.
            self.last_text = b""
            self.edge.uploads.discard(http_request)
            if http_request.ended:
                self.transport.close()
            else:
                http_request.refusal = pipelining.NO_SENSE
                self._advance(http_request)
        elif self.busy and (self.in_head or http_request is not None):
            self.last_text = words
        else:
            self.last_text = b"" if self.busy else words
            self._say_last()

    def _say_last(self) -> None:
        self.write(self.last_text or b"")
        self.transport.close()
        self.edge.idle.waits_for_reader(self)

    def on_message_begin(self) -> None:
        """A new request."""
        self.in_head = True
        self.http_request = None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there: relay, or leave it to FastAPI."""
        self.in_head = False
        if self.parser.should_upgrade():
            return  # See _parse.
        if len(self.headers) > HEADERS_MAX:
            raise TooManyHeaders
        self.edge.idle.head_came(self)
        headers, self.headers = self.headers, pipelining.NO_TRAILERS
        path = PATHS.get(self.url.partition(b"?")[0])
        if path is None or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        http11 = self.parser.get_http_version() == "1.1"
        keep = http11 and self.parser.should_keep_alive()
        http_request = self.http_request = self.edge.admit(self, path, headers, http11=http11, keep=keep)
        before, self.cycle = self.cycle, PipelinedRequest(http_request)
        if (before is None or before.response_complete) and not self.held:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, PipelinedRequest):
            super()._start_asgi_task(cycle, app)
            return
        self.serving = cycle.http_request
        cycle.http_request.my_turn = True
        if self.expect_100_continue and cycle.http_request.refusal is None and not cycle.http_request.upload.complete:
            self.transport.write(pipelining.CONTINUE)
        self._advance(cycle.http_request)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self.body_bytes += len(body)
        http_request = self.http_request
        if http_request is None:
            super().on_body(body)
        elif http_request.refusal is None:
            http_request.upload.add(body)
            if self.edge.limit_body(http_request, http_request.upload.size):
                self._advance(http_request)

    def on_message_complete(self) -> None:
        """The whole request is there."""
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

    def _advance(self, http_request: HttpRequest) -> None:
        if not http_request.my_turn or http_request.ended:
            return
        if http_request.refusal is not None:
            http_request.refuse(http_request.refusal)
        elif http_request.upload.complete:
            task = self.loop.create_task(self.edge.serve(http_request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def on_response_complete(self) -> None:
        """The next request's turn, when the client has read its answers. While others wait, nothing more is read."""
        if self.flow.write_paused or self.transport.is_closing():
            self.held = True
            self.flow.pause_reading()
            self.edge.idle.waits_for_reader(self)
        elif self.last_text is not None and not self.pipeline:
            self._say_last()
        else:
            super().on_response_complete()
            if self.pipeline:
                self.flow.pause_reading()

    def pause_writing(self) -> None:
        """The client does not read fast enough. Whoever waits for it waits ``read_s_max``."""
        super().pause_writing()
        self.edge.idle.waits_for_reader(self)

    def resume_writing(self) -> None:
        """It has read most of what it got."""
        super().resume_writing()
        self.edge.idle.has_read(self)
        if self.held and not self.transport.is_closing():
            self.held = False
            self.on_response_complete()

    def shutdown(self) -> None:
        """Take no more requests on this connection."""
        if self.serving is not None and not self.serving.ended:
            self.serving.close_after()
        elif isinstance(self.cycle, PipelinedRequest) and not self.cycle.response_complete:
            self.cycle.http_request.close_after()
        else:
            super().shutdown()

    @property
    def busy(self) -> bool:
        """Whether an answer is owed."""
        return self.cycle is not None and not self.cycle.response_complete

    def unsent_bytes(self) -> int:
        """What still waits for the client to read."""
        return self.transport.get_write_buffer_size()

    def head_is_late(self) -> None:
        """No request came in time, or no whole one."""
        if self.in_head:
            self.transport.write(pipelining.HEAD_TOO_SLOW)
            self.transport.close()
            self.edge.idle.waits_for_reader(self)
        else:
            self.transport.abort()

    def reader_is_late(self) -> None:
        """The client does not read. Its legs are cancelled when the connection is gone."""
        if self.serving is not None:
            self.serving.slow = True
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """The client wants nothing more. If it has not read the last answer by now, it never will."""
        if self.unsent_bytes():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

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
        """The response is complete."""
        if close:
            self.transport.close()
        self.on_response_complete()

    def abort(self) -> None:
        """Drop the connection."""
        self.transport.abort()
