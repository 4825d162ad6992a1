"""A clock for tests."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only when a test says so."""

    def __init__(self, now: float = 1000.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._now = now
        self._wall_ms = wall_ms

    def now(self) -> float:
        return self._now

    def wall_ms(self) -> int:
        return self._wall_ms

    def wall_s(self) -> float:
        return self._wall_ms / 1000

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass on both clocks."""
        self._now += seconds
        self._wall_ms += round(seconds * 1000)
