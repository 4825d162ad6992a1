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

    now = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
