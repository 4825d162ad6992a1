"""One client connection: uvicorn's protocol, with the relayed paths served without ASGI.

ASGI's messages and events would each cost more than placement. Everything else goes the usual way, to FastAPI.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.edge import RELAYED, Edge
from services.router.exchange import Exchange

HEAD_BYTES_MAX = 64 * 1024
"""Request line and headers; a larger head is answered with 431 and the connection is closed."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
HEAD_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NOT_HTTP = "Invalid HTTP request received."
OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})

PATHS = {path.encode(): path for path in RELAYED}


class RouterProtocol(HttpToolsProtocol):
    """One client connection."""

    app: Any
    """What ``make_server`` gave to uvicorn: the edge."""
    cycle: Any
    """uvicorn's cycle, or an exchange's place in the connection's order of requests."""
    exchange: Exchange | None = None
    """The relayed request whose body comes, or whose answer goes, just now."""
    serving: Exchange | None = None
    """The relayed request whose turn it is; later ones of the same connection wait in ``pipeline``."""
    in_head = False
    head_bytes = 0
    """Of the present head, at most."""

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._unset_keepalive_if_required()
        self.head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response(NOT_HTTP)
            return
        exchange = self.exchange
        if self.in_head:
            if self.head_bytes > HEAD_BYTES_MAX:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
            self.edge.idle.waits_for_head(self)
        elif exchange is not None and not exchange.upload.complete:
            self.edge.uploads.add(exchange)
        elif (exchange is None or exchange.ended) and not self.busy:
            self.edge.idle.waits_for_head(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        self.edge: Edge = self.app
        super().connection_made(transport)
        self.edge.idle.waits_for_head(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, and with it everybody who waits for answers on this connection."""
        super().connection_lost(exc)
        self.edge.idle.left(self)
        cycles = [self.cycle, *[cycle for cycle, _app in self.pipeline]]
        exchanges = {cycle.exchange for cycle in cycles if isinstance(cycle, Turn)}
        for exchange in exchanges | ({self.serving} if self.serving is not None else set()):
            exchange.client_left()
            self.edge.uploads.discard(exchange)

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's client offers HTTP/2 with every request. The parser skips the body of such a request, so it is
            # read once more as what it is without the offer. One in each read is plenty.
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            try:
                self.parser.feed_data(head + data[upgrade.args[0] :])
            except httptools.HttpParserUpgrade as again:
                raise httptools.HttpParserError(NOT_HTTP) from again

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                lines += [b"connection: close"] if b"close" in value.lower() else []
            elif name not in OF_UPGRADES:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """A new request."""
        self.in_head = True
        self.exchange = None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there: relay, or leave it to FastAPI."""
        self.in_head = False
        if self.parser.should_upgrade():
            return  # See _parse.
        self.edge.idle.head_came(self)
        path = PATHS.get(self.url.partition(b"?")[0])
        if path is None or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        http11 = self.parser.get_http_version() == "1.1"
        keep_alive = http11 and self.parser.should_keep_alive()
        exchange = self.exchange = self.edge.admit(self, path, self.headers, http11=http11, keep=keep_alive)
        before, self.cycle = self.cycle, Turn(exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, Turn):
            super()._start_asgi_task(cycle, app)
            return
        self.serving = cycle.exchange
        cycle.exchange.my_turn = True
        if self.expect_100_continue and cycle.exchange.refusal is None and not cycle.exchange.upload.complete:
            self.transport.write(CONTINUE)
        self._advance(cycle.exchange)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        exchange = self.exchange
        if exchange is None:
            super().on_body(body)
        elif exchange.refusal is None:
            exchange.upload.add(body)
            if self.edge.bound(exchange, exchange.upload.size):
                self._advance(exchange)

    def on_message_complete(self) -> None:
        """The whole request is there."""
        self.head_bytes = 0
        if self.parser.should_upgrade():
            return
        exchange = self.exchange
        if exchange is None:
            super().on_message_complete()
            return
        exchange.upload.complete = True
        self.edge.uploads.discard(exchange)
        self._advance(exchange)

    def _advance(self, exchange: Exchange) -> None:
        if not exchange.my_turn or exchange.ended:
            return
        if exchange.refusal is not None:
            exchange.refuse(exchange.refusal)
        elif exchange.upload.complete:
            task = self.loop.create_task(self.edge.serve(exchange))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def on_response_complete(self) -> None:
        """The next request's turn. Nothing more is read while others wait, or a client could fill our memory."""
        super().on_response_complete()
        if self.flow.write_paused or self.transport.is_closing():
            self.edge.idle.waits_for_reader(self)
        elif self.pipeline:
            self.flow.pause_reading()

    def shutdown(self) -> None:
        """Take no more requests on this connection."""
        if self.serving is not None and not self.serving.ended:
            self.serving.last()
        elif isinstance(self.cycle, Turn) and not self.cycle.response_complete:
            self.cycle.exchange.last()
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
            self.transport.write(HEAD_TOO_SLOW)
            self.transport.close()
            self.edge.idle.waits_for_reader(self)
        else:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """The client wants nothing more. If it has not read the last answer by now, it never will."""
        if self.unsent_bytes():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def write(self, data: bytes) -> None:
        """For exchanges: to the socket, if it is still there."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def write_paused(self) -> bool:
        """For exchanges: whether the client reads too slowly."""
        return self.flow.write_paused

    async def drain(self) -> None:
        """For exchanges: wait for the client."""
        await self.flow.drain()

    def answered(self, *, close: bool) -> None:
        """For exchanges: the answer is complete."""
        if close:
            self.transport.close()
        self.on_response_complete()

    def abort(self) -> None:
        """For exchanges: drop the connection."""
        self.transport.abort()


class Turn:
    """An exchange's place among the requests of its connection, in the shape that uvicorn's protocol looks at."""

    __slots__ = ("disconnected", "exchange", "message_event")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.disconnected = False
        self.message_event = NOBODY_WAITS

    @property
    def response_complete(self) -> bool:
        """Whether the next request may be served."""
        return self.exchange.ended


class _NobodyWaits:
    def set(self) -> None:
        """Nothing: an exchange is told directly."""


NOBODY_WAITS = _NobodyWaits()
