"""The console's event stream: a new client gets the whole page, then only the changes.

Messages on the bus wake the feed, which sends everything that has changed since its last update. Without clients
it computes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from services.collector.console.state import changes
from services.collector.console.views import Page

UPDATE_S_MIN = 0.5
"""Shortest time between two updates."""
UPDATE_S_MAX = 1.0
"""Longest time between two updates: rates fall and silences grow without any message."""
CLIENT_FRAMES_MAX = 16
"""Updates that a client may be behind; then its stream ends."""
OPERATOR = ""
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": still here\n\n"
"""A comment line, so that no proxy closes an idle connection."""

EXTRA = dict[str, Any]


class WatcherLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many clients may read the stream at a time."""

    total: int = 32
    for_operators: int = 8
    """Places of the total that only clients that may give orders take."""
    per_address: int = 8
    """Clients that may not give orders, from one address (for IPv6: one /64 network)."""


class Watcher:
    """One client of the stream."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        """The client's address or network; empty for an operator."""
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(CLIENT_FRAMES_MAX + 1)
        self.is_new = True
        """Whether the client has not received the whole page yet."""

    async def next(self) -> bytes | None:
        """The next frame to send; None at the end of the stream."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await self._frames.get()
        except TimeoutError:
            return KEEP_ALIVE

    def send(self, frame: bytes) -> bool:
        """Queue a frame. False: the client does not read, and the stream ends. The edge drops its connection when it
        has not read for ``read_s_max``.
        """
        if self._frames.qsize() < CLIENT_FRAMES_MAX:
            self._frames.put_nowait(frame)
            return True
        while not self._frames.empty():
            self._frames.get_nowait()
        self.end()
        return False

    def end(self) -> None:
        """End the stream after the frames that are queued."""
        if not self._frames.full():
            self._frames.put_nowait(None)


class Feed:
    """All clients of the stream. Operators have places that no others can take."""

    def __init__(self, page: Callable[[], Page], extra: EXTRA, limits: WatcherLimits) -> None:
        self._page = page
        self._extra = extra
        """Fields of the page that never change."""
        self._limits = limits
        self._watchers: set[Watcher] = set()
        self._changed = asyncio.Event()
        self._watched = asyncio.Event()
        self._sent: Page | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def wake(self) -> None:
        """Something may have changed."""
        self._changed.set()

    def join(self, owner: str, *, operator: bool) -> Watcher | None:
        """Add a client; ``owner``: its address or network. None: there are too many."""
        owner = OPERATOR if operator else owner
        owners = [watcher.owner for watcher in self._watchers]
        others = len(owners) - owners.count(OPERATOR)
        full = len(owners) >= self._limits.total
        if not operator:
            full |= others >= self._limits.total - self._limits.for_operators
            full |= owners.count(owner) >= self._limits.per_address
        if self._closed or full:
            return None
        watcher = Watcher(owner)
        self._watchers.add(watcher)
        self._watched.set()
        self.wake()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._watched.clear()
            self._sent = None

    def close(self) -> None:
        """End all streams and accept no new ones."""
        self._closed = True
        for watcher in self._watchers:
            watcher.end()

    async def follow(self) -> None:
        """Send updates until cancelled."""
        while True:
            await self._watched.wait()
            try:
                async with asyncio.timeout(UPDATE_S_MAX):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self.update()
            await asyncio.sleep(UPDATE_S_MIN)

    def update(self) -> None:
        """Send new clients the whole page, the others the changes."""
        page, sent = self._page(), self._sent
        self._sent = page
        update = b"".join(framed(name, data) for name, data in changes(sent, page)) if sent is not None else b""
        whole = b""
        for watcher in list(self._watchers):
            if watcher.is_new:
                watcher.is_new = False
                whole = whole or framed("state", whole_page(page, self._extra))
                frame = whole
            else:
                frame = update
            if frame and not watcher.send(frame):
                self.leave(watcher)


def whole_page(page: Page, extra: EXTRA) -> EXTRA:
    """The fields of the page with those that never change."""
    return {name: getattr(page, name) for name in page.__struct_fields__} | extra


def framed(name: str, data: Any) -> bytes:
    """One server-sent event. Encoded JSON has no line breaks, so the data is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
