"""uvicorn inside the service's task group, with a way to drop the connection of a client that does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LISTEN_S_MAX = 10.0
LISTEN_POLL_S = 0.01
CLOSE_S_MAX = 3
"""For responses in progress when the process stops."""
CONNECTIONS_MAX = 512
"""Concurrent connections; further ones get 503."""
ABORT = "baton.abort"
"""ASGI extension: a function that drops the request's connection at once, with all unread data."""


class Protocol(HttpToolsProtocol):
    """One client connection. A client that is slow to send its request is dropped: connections are limited."""

    headers_s_max = 20.0
    """From the opening of the connection, or from a later request's first byte, to the end of its headers."""
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_received()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limit_headers()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._headers_received()
        super().on_headers_complete()

    def _limit_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.headers_s_max, self.transport.abort)

    def _headers_received(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def abort_of(scope: MutableMapping[str, Any]) -> Callable[[], None]:
    """The function that drops this request's connection; does nothing under another server."""
    abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, {}).get("abort", _nothing)
    return abort


def _nothing() -> None:
    """The connection belongs to another server."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: the process handles signals."""

    def __init__(self, app: FastAPI, host: str, port: int, protocol: type[Protocol] = Protocol) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_graceful_shutdown=CLOSE_S_MAX,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listening(self) -> None:
        """Wait until connections are accepted. Raises TimeoutError."""
        async with asyncio.timeout(LISTEN_S_MAX):
            while not self.started:  # noqa: ASYNC110  # uvicorn has no event for it.
                await asyncio.sleep(LISTEN_POLL_S)
