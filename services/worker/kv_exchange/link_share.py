"""How much of a worker's time prefetches may read: a share of what its requests' own reads leave. And of how much use
they have been.

The share is learned: what requests read is measured, and what a token takes to prefetch, too. A prefetch that took long
keeps the next one away for longer, as in ``prefix_copy``.
"""

from __future__ import annotations

import math

PREFETCH_SHARE_MAX = 0.5
"""Share of the time without reads of requests."""
BURST_S = 1.0
"""Time that prefetches may read at once after a pause."""
MEMORY_S = 30.0
"""Time constant with which reads of requests are forgotten."""
TOKEN_WEIGHT = 0.25
"""Weight of the newest prefetch in the time for a token."""


class LinkShare:
    """Seconds that prefetches may still read; below zero after one that took longer. ``now``: on any clock."""

    def __init__(self, now: float) -> None:
        self.requests_share = 0.0
        """Share of the time, lately, in which requests read. Reads side by side count each."""
        self.token_s = 0.0
        """What prefetching a token takes; 0.0: not known yet."""
        self._left_s = BURST_S
        self._at = now
        self._read_s = 0.0
        self._under_way = 0

    @property
    def share(self) -> float:
        """Share of the time that prefetches may take."""
        return PREFETCH_SHARE_MAX * max(0.0, 1.0 - self.requests_share)

    def observe(self, read_s: float, now: float) -> None:
        """``read_s``: time that requests' reads have taken since the start of the engine."""
        passed_s = now - self._at
        if passed_s <= 0.0:
            return
        rate = max(0.0, read_s - self._read_s) / passed_s
        self.requests_share += (1.0 - math.exp(-passed_s / MEMORY_S)) * (rate - self.requests_share)
        self._left_s = min(BURST_S, self._left_s + self.share * passed_s)
        self._at, self._read_s = now, read_s

    def wait_s(self) -> float:
        """How long a prefetch must wait; 0.0: it may begin. Infinite while requests read all the time, and while the
        first prefetch, from which the rest is learned, is under way.
        """
        if not self.token_s and self._under_way:
            return math.inf
        if self._left_s > 0.0 and self.share > 0.0:
            return 0.0
        return (max(0.0, -self._left_s) + 0.001) / self.share if self.share > 0.0 else math.inf

    def begin(self, tokens: int) -> float:
        """A prefetch of so many tokens begins; returns what is set aside for it."""
        self._under_way += 1
        aside_s = tokens * self.token_s
        self._left_s -= aside_s
        return aside_s

    def end(self, aside_s: float, tokens: int, seconds: float) -> None:
        """It has ended after so many ``seconds``, with so many tokens."""
        self._under_way -= 1
        self._left_s += aside_s - seconds
        if tokens > 0 and seconds > 0.0:
            token_s = seconds / tokens
            self.token_s += (TOKEN_WEIGHT if self.token_s else 1.0) * (token_s - self.token_s)


USES_MEMORY_S = 600.0
"""Time constant with which it is forgotten what came of prefetched blocks."""
BLOCKS_ASSUMED = 256.0
"""Blocks that count as used before any are counted."""


class UsedShare:
    """The share of prefetched blocks that requests find later, of those of which something has come lately."""

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._wasted = 0.0
        self._totals = 0, 0
        self._at = now

    @property
    def share(self) -> float:
        """1.0 while nothing is known."""
        return (self._used + BLOCKS_ASSUMED) / (self._used + self._wasted + BLOCKS_ASSUMED)

    def observe(self, used: int, wasted: int, now: float) -> None:
        """Totals since the start of the engine."""
        left = math.exp(-max(0.0, now - self._at) / USES_MEMORY_S)
        self._used = self._used * left + max(0, used - self._totals[0])
        self._wasted = self._wasted * left + max(0, wasted - self._totals[1])
        self._totals, self._at = (used, wasted), now
