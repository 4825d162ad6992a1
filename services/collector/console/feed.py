"""Who looks at the console, and what they are told: the whole page at first, then what changes, as it changes.

What happens on the bus wakes the feed; it then tells all at once what has changed since it told last. While nobody
looks, nothing is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from services.collector.console.state import changes
from services.collector.console.views import Page

TELL_S = 0.5
"""Between two turns of telling, at least."""
AGE_S = 1.0
"""And at most, for rates fall and silence grows although nothing happens."""
CLIENT_FRAMES_MAX = 16
"""Turns that a client may be behind: one that does not read is cut off."""
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": still here\n\n"
"""What nobody reads, so that no proxy takes the connection for dead."""

EXTRA = dict[str, Any]


class Watcher:
    """One client that looks."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(CLIENT_FRAMES_MAX + 1)
        self.is_new = True
        """It has not been told the whole page."""

    async def next(self) -> bytes | None:
        """What to send next; None when that was all."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await self._frames.get()
        except TimeoutError:
            return KEEP_ALIVE

    def tell(self, frame: bytes) -> bool:
        """Have this sent. False: it has been cut off, because it does not read."""
        if self._frames.qsize() < CLIENT_FRAMES_MAX:
            self._frames.put_nowait(frame)
            return True
        self._abort()
        while not self._frames.empty():
            self._frames.get_nowait()
        self.end()
        return False

    def end(self) -> None:
        """There is no more, once it has what it was told."""
        if not self._frames.full():
            self._frames.put_nowait(None)


class Feed:
    """All of them, at most ``watchers_max``."""

    def __init__(self, page: Callable[[], Page], extra: EXTRA, watchers_max: int) -> None:
        self._page = page
        self._extra = extra
        """What a page has besides, and never changes."""
        self._watchers_max = watchers_max
        self._watchers: set[Watcher] = set()
        self._changed = asyncio.Event()
        self._watched = asyncio.Event()
        self._told: Page | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def wake(self) -> None:
        """Something happened."""
        self._changed.set()

    def join(self, abort: Callable[[], None]) -> Watcher | None:
        """One more looks; ``abort`` drops its connection. None: there are too many."""
        if self._closed or len(self._watchers) >= self._watchers_max:
            return None
        watcher = Watcher(abort)
        self._watchers.add(watcher)
        self._watched.set()
        self.wake()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It looks no more."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._watched.clear()
            self._told = None

    def close(self) -> None:
        """Let everybody go, and nobody in."""
        self._closed = True
        for watcher in self._watchers:
            watcher.end()

    async def follow(self) -> None:
        """Tell what changes, until cancelled."""
        while True:
            await self._watched.wait()
            try:
                async with asyncio.timeout(AGE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self.tell()
            await asyncio.sleep(TELL_S)

    def tell(self) -> None:
        """What is new to whom."""
        page, told = self._page(), self._told
        self._told = page
        news = b"".join(framed(name, data) for name, data in changes(told, page)) if told is not None else b""
        whole = b""
        for watcher in list(self._watchers):
            if watcher.is_new:
                watcher.is_new = False
                whole = whole or framed("state", whole_page(page, self._extra))
                frame = whole
            else:
                frame = news
            if frame and not watcher.tell(frame):
                self.leave(watcher)


def whole_page(page: Page, extra: EXTRA) -> EXTRA:
    """What a newcomer is told."""
    return {name: getattr(page, name) for name in page.__struct_fields__} | extra


def framed(name: str, data: Any) -> bytes:
    """One server-sent event. JSON has no line breaks, so its data is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
