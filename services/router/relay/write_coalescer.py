"""Fewer, larger writes of streams while the router is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

BUSY_EVENTS_PER_S: Final = 10_000
"""Frames of all legs: a router with fewer writes each event at once."""
WRITES_PER_S: Final = 5_000
"""Writes of all streams together, in a router with more events."""
HELD_PERIODS: Final = 1.5
"""A stream that has written within this many periods waits. One would be too few: the common moment comes a period
after the first stream began to wait, and each stream writes a little later than the one before it.
"""
WINDOW_S: Final = 0.05
"""Seconds over which events are counted."""
RESUMED_AT_ONCE: Final = 64
"""Streams that write in one turn of the event loop, about a millisecond's work."""


class WriteCoalescer:
    """Joins the events of many streams into about ``WRITES_PER_S`` writes while more than ``BUSY_EVENTS_PER_S`` arrive.
    A socket write costs more than everything else the router does for an event; most of that is waking the client.

    A stream that has written waits until the moment when all waiting streams write: at most as many seconds as there
    are streams for ``WRITES_PER_S``, and at most ``period_s_max``. A stream with fewer events than that never waits.
    """

    def __init__(self, period_s_max: float) -> None:
        self.period_s = 0.0
        """How long the first waiting stream waits; 0: no stream must."""
        self._period_s_max = period_s_max
        self._streams = 0
        self._received = 0
        """Frames of all legs, counted at ``_counted_at``."""
        self._counted_at = 0.0
        self._waiting: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()

    def enter(self) -> None:
        """One more stream."""
        self._streams += 1

    def leave(self) -> None:
        """One stream less."""
        self._streams -= 1

    def must_wait(self, written_at: float, now: float, received: int) -> bool:
        """Whether a stream that writes now, and did at ``written_at``, waits before its next write (see ``add``).
        ``received`` counts the frames of all legs since the start, also those that wait to be written.
        """
        took_s = now - self._counted_at
        if took_s >= WINDOW_S:
            is_busy = received - self._received > took_s * BUSY_EVENTS_PER_S
            self.period_s = min(self._period_s_max, self._streams / WRITES_PER_S) if is_busy else 0.0
            self._received = received
            self._counted_at = now
        return now - written_at < HELD_PERIODS * self.period_s

    def add(self, resume: Callable[[], None]) -> None:
        """Call it at the next common moment."""
        if not self._waiting:
            self._loop.call_later(self.period_s, self._resume_all)
        self._waiting.append(resume)

    def _resume_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._resume(waiting)

    def _resume(self, waiting: list[Callable[[], None]]) -> None:
        for resume in waiting[:RESUMED_AT_ONCE]:
            resume()
        if len(waiting) > RESUMED_AT_ONCE:
            self._loop.call_soon(self._resume, waiting[RESUMED_AT_ONCE:])
