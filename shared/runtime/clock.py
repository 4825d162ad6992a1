"""Clocks. Shells read a clock; cores get the time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean something."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, for what other processes or people read."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class FakeClock:
    """A clock that moves only when a test says so."""

    def __init__(self, now: float = 1000.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._now = now
        self._wall_ms = wall_ms

    def now(self) -> float:
        return self._now

    def wall_ms(self) -> int:
        return self._wall_ms

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass on both clocks."""
        self._now += seconds
        self._wall_ms += round(seconds * 1000)
