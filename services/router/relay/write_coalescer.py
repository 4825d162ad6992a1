"""Batches the writes of many fast streams into one turn of the event loop.

A socket write costs more than everything else the router does for an event; most of that is waking the client. With
few streams the wait is too short to matter. With hundreds at full speed it saves most of the CPU. A stream with 10 ms
or more between its tokens never waits.
"""

from __future__ import annotations

import asyncio

PERIOD_S_PER_STREAM = 50e-6
PERIOD_S_MAX = 0.01


class WriteCoalescer:
    """``with coalescer:`` around each stream; ``wait`` ends at the moment when all waiting streams write."""

    def __init__(self) -> None:
        self.period_s = 0.0
        """A stream that has written less than this ago waits before its next write."""
        self._streams = 0
        self._next: asyncio.Event | None = None

    def __enter__(self) -> None:
        self._streams += 1
        self.period_s = min(PERIOD_S_MAX, self._streams * PERIOD_S_PER_STREAM)

    def __exit__(self, *_exc: object) -> None:
        self._streams -= 1
        self.period_s = min(PERIOD_S_MAX, self._streams * PERIOD_S_PER_STREAM)

    async def wait(self) -> None:
        """Wait for the next common moment, at most ``PERIOD_S_MAX``."""
        if self._next is None:
            self._next = asyncio.Event()
            asyncio.get_running_loop().call_later(self.period_s, self._wake_all)
        await self._next.wait()

    def _wake_all(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set()
