"""An HTTP server: uvicorn with ``EdgeProtocol``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from shared.addresses import host_port
from shared.http.edge import HttpEdge
from shared.http.limits import BACKLOG
from shared.http.protocol import EdgeProtocol
from shared.sockets import family_of

DATE_S = 1.0
"""A response's Date has seconds."""


TURNS = 4
"""Turns of the event loop in which connections that wait are accepted, and requests that have arrived are read. A loop
that was busy has not seen them yet, and looks at timers and signals first.
"""


class PortTaken(Exception):
    """Another process listens there."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, since the service handles signals. It ends when told to, and not when it
    looks, which uvicorn does every 0.1 s; it waits 0.1 s for connections to close only where there are some.
    """

    def __init__(self, config: uvicorn.Config, edge: HttpEdge[Any]) -> None:
        super().__init__(config)
        self.edge = edge
        self.listening = asyncio.Event()
        self._further: list[socket.socket] = []
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, then set ``listening``."""
        await super().startup(sockets)
        self.listening.set()

    async def listen_too(self, bound: socket.socket) -> None:
        """Accept from one more socket too; ``shutdown`` closes it with the others."""
        protocol = functools.partial(
            EdgeProtocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_server(protocol, sock=bound, backlog=BACKLOG))
        self._further.append(bound)

    def stop(self) -> None:
        """Let ``serve`` end: see ``shutdown``."""
        self._stopping.set()

    async def main_loop(self) -> None:
        while not self._stopping.is_set():
            await self.on_tick(0)  # It sets the headers of all responses of the app, with the time.
            self.edge.date_line = b"date: %b\r\n" % dict(self.server_state.default_headers)[b"date"]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections; wait for running requests, also those that have arrived and are not read yet."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        listening = [*(sockets or []), *self._further]
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(listening)
            return
        for server in self.servers:
            server.close()
        for bound in listening:
            bound.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(edge: HttpEdge[Any]) -> Server:
    """The server; ``serve(sockets=[...])`` runs it until ``stop``. ``edge.end_late``, or another task that calls
    ``edge.idle.end_late``, must run beside it.
    """
    config = uvicorn.Config(
        edge,
        http=EdgeProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        headers=list(edge.headers),
        timeout_graceful_shutdown=int(edge.limits.drain_s_max),
    )
    return Server(config, edge)


def listen(host: str, port: int, prefix: str = "ROUTER_") -> socket.socket:
    """A listening socket; ``prefix`` is that of the settings that name it. Raises PortTaken."""
    listener = _bound(host, port, f"{prefix}HOST or {prefix}PORT")
    listener.listen(BACKLOG)
    return listener


def share(host: str, port: int) -> socket.socket:
    """A socket for a port that routers share; it does not listen yet. The kernel spreads connections over the routers
    that listen. Raises PortTaken when a process has the port without sharing it.
    """
    return _bound(host, port, "ROUTER_HOST or ROUTER_SHARED_PORT", socket.SO_REUSEPORT)


def _bound(host: str, port: int, settings: str, *options: int) -> socket.socket:
    bound = socket.socket(family_of(host), socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, *options):
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise PortTaken(f"cannot listen on {host_port(host, port)}: {error.strerror}; set {settings}") from error
    bound.setblocking(False)
    return bound
