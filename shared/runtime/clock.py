"""Clocks. Shells read a clock; cores get the time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; only differences mean something."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, for what other processes or people read."""

    def wall_s(self) -> float:
        """Seconds since 1970."""


class SystemClock:
    # Each request asks for these: functions in C, so that no function of Python is called for it.
    now = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
