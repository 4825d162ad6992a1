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
ABORT = "baton.abort"
"""Among a request's extensions: drops its connection at once, with whatever its client has not read."""


class Protocol(HttpToolsProtocol):
    """One client connection."""

    def on_message_begin(self) -> None:
        """A new request."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: {"abort": self.transport.abort}}


def abort_of(scope: MutableMapping[str, Any]) -> Callable[[], None]:
    """What drops this request's connection; nothing where there is none to drop."""
    abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, {}).get("abort", _nothing)
    return abort


def _nothing() -> None:
    """Somebody else has the connection."""


class HttpServer(uvicorn.Server):
    """Signals are the process's business."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
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
