"""uvicorn as a child of our task group, with a way to drop the connection of a client that does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LISTEN_S_MAX = 10.0
LISTEN_LOOK_S = 0.01
CLOSE_S_MAX = 3
"""For answers that are under way when the process stops."""
CONNECTIONS_MAX = 512
"""At a time; more are told 503."""
ABORT = "baton.abort"
"""Among a request's extensions: drops its connection at once, with whatever its client has not read."""


class Protocol(HttpToolsProtocol):
    """One client connection. Who takes too long to ask is dropped: connections are bounded, and others want theirs."""

    head_s_max = 20.0
    """From the opening of the connection, or a later request's first byte, to the end of the request's head."""
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._head_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A new request."""
        super().on_message_begin()
        self._wait_for_head()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._head_came()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s_max, self.transport.abort)

    def _head_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def abort_of(scope: MutableMapping[str, Any]) -> Callable[[], None]:
    """What drops this request's connection; nothing where there is none to drop."""
    abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, {}).get("abort", _nothing)
    return abort


def _nothing() -> None:
    """Somebody else has the connection."""


class HttpServer(uvicorn.Server):
    """Signals are the process's business."""

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
        """Leave signals to the service."""
        yield

    async def listening(self) -> None:
        """Wait until connections are accepted. Raises TimeoutError."""
        async with asyncio.timeout(LISTEN_S_MAX):
            while not self.started:  # noqa: ASYNC110  # uvicorn has no event for it.
                await asyncio.sleep(LISTEN_LOOK_S)
