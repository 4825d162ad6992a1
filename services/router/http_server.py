"""uvicorn, set up for long streams and short requests, with bounds on what a client may send.

The relayed paths are served at the protocol, without ASGI's messages and events: each would cost more than placement.
Everything else goes the usual way, to FastAPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.edge import RELAYED, Edge
from services.router.exchange import Exchange
from services.router.settings import Settings

HEAD_BYTES_MAX = 64 * 1024
"""Request line and headers; a larger head is answered with 431 and the connection is closed."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BACKLOG = 4096

PATHS = {path.encode(): path for path in RELAYED}


class PortTaken(Exception):
    """Somebody else listens there."""


class RouterProtocol(HttpToolsProtocol):
    """One client connection."""

    app: Any
    """What ``make_server`` gave to uvicorn: the edge."""
    cycle: Any
    """uvicorn's cycle, or an exchange's place in the connection's order of requests."""
    exchange: Exchange | None = None
    """The relayed request whose body comes, or whose answer goes, just now."""
    in_head = False
    head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        super().data_received(data)
        if self.in_head:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_BYTES_MAX:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
        elif self.exchange is not None and not self.exchange.upload.complete:
            self.edge.uploads.add(self.exchange)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        self.edge: Edge = self.app
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, and with it everybody who waits for answers on this connection."""
        super().connection_lost(exc)
        waiting = [cycle for cycle, _app in self.pipeline]
        for cycle in (self.cycle, *waiting):
            if isinstance(cycle, Turn):
                cycle.exchange.client_left()
                self.edge.uploads.discard(cycle.exchange)

    def on_message_begin(self) -> None:
        """A new request."""
        self.in_head = True
        self.head_bytes = 0
        self.exchange = None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there: relay, or leave it to FastAPI."""
        self.in_head = False
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

    def shutdown(self) -> None:
        """Take no more requests on this connection."""
        cycle = self.cycle
        if isinstance(cycle, Turn) and not cycle.response_complete:
            cycle.exchange.last()
        else:
            super().shutdown()

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


class Server(uvicorn.Server):
    """Signals are the service's business, not uvicorn's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept; ``listening`` is set then."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


def make_server(edge: Edge, settings: Settings) -> Server:
    """The server; ``serve(sockets=[...])`` runs it until ``should_exit``."""
    config = uvicorn.Config(
        edge,
        http=RouterProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=int(settings.drain_s_max),
    )
    return Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}; set ROUTER_HOST or ROUTER_PORT") from error
    listener.setblocking(False)
    return listener
