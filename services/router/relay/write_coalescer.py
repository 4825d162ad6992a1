"""When many streams run at full speed, they gather data for a moment and are all written in one turn of the loop.

A write costs more than all else that is done for an event, most of it for waking the reader. With few streams nobody
waits long; with hundreds at full speed the processor belongs to all of them. A token every 10 ms or slower never waits.
"""

from __future__ import annotations

import asyncio

PERIOD_S_PER_STREAM = 50e-6
PERIOD_S_MAX = 0.01


class WriteCoalescer:
    """``with coalescer:`` around each stream; ``beat`` waits for the moment at which all of them write."""

    def __init__(self) -> None:
        self.period_s = 0.0
        """Streams that get data faster than this gather it."""
        self._streams = 0
        self._next: asyncio.Event | None = None

    def __enter__(self) -> None:
        self._streams += 1
        self.period_s = min(PERIOD_S_MAX, self._streams * PERIOD_S_PER_STREAM)

    def __exit__(self, *_exc: object) -> None:
        self._streams -= 1
        self.period_s = min(PERIOD_S_MAX, self._streams * PERIOD_S_PER_STREAM)

    async def beat(self) -> None:
        """Wait for the next common moment, at most ``PERIOD_S_MAX``."""
        if self._next is None:
            self._next = asyncio.Event()
            asyncio.get_running_loop().call_later(self.period_s, self._strike)
        await self._next.wait()

    def _strike(self) -> None:
        struck, self._next = self._next, None
        if struck is not None:
            struck.set()
