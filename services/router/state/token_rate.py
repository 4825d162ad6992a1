"""A decaying mean rate."""

from __future__ import annotations

import math

MEMORY_S = 10.0
"""Time constant of the decay."""


class TokenRate:
    """Tokens per second, from a running total that is reported now and then."""

    __slots__ = ("_at", "_per_s", "_total")

    def __init__(self) -> None:
        self._total = 0
        self._at = math.nan
        self._per_s = 0.0

    def told(self, total: int, now: float) -> float:
        """The total is ``total`` at ``now``; returns the rate. After a total that shrank (a restart), counting begins
        anew.
        """
        took_s = now - self._at
        if math.isnan(took_s) or total < self._total:
            self._total, self._at = total, now
        elif took_s > 0.0:
            kept = math.exp(-took_s / MEMORY_S)
            self._per_s = kept * self._per_s + (1.0 - kept) * (total - self._total) / took_s
            self._total, self._at = total, now
        return self._per_s
