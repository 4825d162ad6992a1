"""Server-sent events for one client, from the feed to its connection."""

from __future__ import annotations

import asyncio

from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.collector.console.feed import Feed, Watcher
from services.collector.http.server import abort_of

FULL = b'{"error":{"message":"Too many look at the console just now (COLLECTOR_CONSOLE_CLIENTS_MAX)."}}'
RETRY_AFTER_S = b"10"


class EventStream(Response):
    """Answers for as long as the client reads and the process serves."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        watcher = self._feed.join(abort_of(scope))
        if watcher is None:
            await Response(FULL, 503, {"retry-after": RETRY_AFTER_S.decode()}, "application/json")(scope, receive, send)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                leaving = tasks.create_task(_until_left(receive, watcher), name="console-client-leaves")
                await _relay(watcher, send)
                leaving.cancel()
        finally:
            self._feed.leave(watcher)


async def _relay(watcher: Watcher, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while (frame := await watcher.next()) is not None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_left(receive: Receive, watcher: Watcher) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.end()
