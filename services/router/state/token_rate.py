"""How fast something goes on, lately."""

from __future__ import annotations

import math

MEMORY_S = 10.0
"""What was so long ago weighs a third of what is now."""


class TokenRate:
    """Tokens in a second, from a total that is told now and then."""

    __slots__ = ("_at", "_per_s", "_total")

    def __init__(self) -> None:
        self._total = 0
        self._at = math.nan
        self._per_s = 0.0

    def told(self, total: int, now: float) -> float:
        """The total is ``total`` now; answers the rate. A total that shrank begins anew."""
        took_s = now - self._at
        if math.isnan(took_s) or total < self._total:
            self._total, self._at = total, now
        elif took_s > 0.0:
            kept = math.exp(-took_s / MEMORY_S)
            self._per_s = kept * self._per_s + (1.0 - kept) * (total - self._total) / took_s
            self._total, self._at = total, now
        return self._per_s
