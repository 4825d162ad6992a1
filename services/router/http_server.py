"""uvicorn, set up for long streams and short requests, with bounds on what a client may send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from services.router.edge import Edge
from services.router.http_protocol import RouterProtocol
from services.router.settings import Settings

BACKLOG = 4096


class PortTaken(Exception):
    """Somebody else listens there."""


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
