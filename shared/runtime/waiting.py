"""Waiting for what a process needs: each attempt has a deadline, their number has none, and the process says what it
waits for: in its log, in its status and at its health endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from shared.bus.port import BusError, BusRefused
from shared.contracts.failures import Reason
from shared.deadline import end


async def first_of(wanted: Awaitable[T], other: Awaitable[object], *, within_s: float | None = None) -> T | None:
    """The result of ``wanted``, or None if ``other`` or the time ended first. Exceptions of both propagate."""
    first, second = asyncio.ensure_future(wanted), asyncio.ensure_future(other)
    try:
        done, _ = await asyncio.wait({first, second}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if first in done:
            return first.result()
        if second in done:
            second.result()
        return None
    finally:
        first.cancel()
        second.cancel()


log = logging.getLogger("baton.service")

T = TypeVar("T")

ATTEMPT_S_MAX = 15.0
RETRY_S_FIRST, RETRY_S_MAX = 0.2, 5.0
SAID_S = 30.0
"""Interval of log lines about the same wait."""
REGISTRY = "JetStream (worker registry)"

PAGE_AFTER_S = 2.0
"""The page opens so late because NATS mostly responds at once: then connections wait for the process's own server."""
CLIENTS_MAX = 64
"""Concurrent connections to the page; further ones are closed."""
CLIENT_S_MAX = 5.0
HEAD_BYTES_MAX = 32 * 1024
RETRY_AFTER_S = 5


class Waits:
    """What this process waits for at present."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._for: list[str] = []

    @property
    def text(self) -> str:
        """``waits for NATS``; empty if it waits for nothing."""
        return f"waits for {', '.join(dict.fromkeys(self._for))}" if self._for else ""

    async def until(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of ``attempt``, tried again after BusError and after ``ATTEMPT_S_MAX`` until it succeeds.

        Raises BusRefused: a retry is useless.
        """
        began, said_at, pause_s = self._now(), -math.inf, RETRY_S_FIRST
        self._for.append(what)
        try:
            while True:
                try:
                    async with asyncio.timeout(ATTEMPT_S_MAX):
                        found = await attempt()
                except BusRefused:
                    raise
                except (BusError, TimeoutError) as error:
                    if self._now() - said_at >= SAID_S:
                        said_at = self._now()
                        why = error or f"no reply within {ATTEMPT_S_MAX:g} s"
                        log.warning("waits for %s, for %.0f s so far: %s", what, said_at - began, why)
                else:
                    if said_at > -math.inf:
                        log.info("%s is available after %.0f s", what, self._now() - began)
                    return found
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
        finally:
            self._for.remove(what)


@asynccontextmanager
async def waiting_page(listener: socket.socket | None, waits: Waits) -> AsyncIterator[None]:
    """Inside this context, after ``PAGE_AFTER_S``, every HTTP request to the listening socket gets 503 with what the
    process waits for.

    The socket stays open and listening: connections that come earlier or later wait for the process's own server.
    """
    if listener is None:
        yield
        return
    serving = asyncio.create_task(_serve_page(listener, _Page(waits)), name="waiting-page")
    try:
        yield
    finally:
        await end([serving])


async def _serve_page(listener: socket.socket, page: _Page) -> None:
    await asyncio.sleep(PAGE_AFTER_S)
    server = await asyncio.start_server(page.serve, sock=listener.dup(), limit=HEAD_BYTES_MAX)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


class _Page:
    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one response."""
        self._clients += 1
        try:
            if self._clients <= CLIENTS_MAX:
                async with asyncio.timeout(CLIENT_S_MAX):
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response())
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._clients -= 1
            writer.close()

    def _response(self) -> bytes:
        reason = self._waits.text or "begins to serve"
        code = str(Reason.BUS_DOWN)  # Nothing but NATS, and what is stored there, is waited for.
        error = {"message": f"This process is starting: it {reason}.", "type": "service_unavailable", "code": code}
        body = json.dumps({"status": "unhealthy", "reason": reason, "error": error}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nretry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body
