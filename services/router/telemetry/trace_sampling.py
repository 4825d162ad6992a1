"""Which requests are traced from their beginning, and how many beyond them when they have ended: so that traces cost
little, a lone request always has one, and what was odd has one as long as not everything is.
"""

from __future__ import annotations

FEW_PER_S = 0.2
FEW_AT_ONCE = 10.0
"""Requests that are traced although the share has not chosen them: of few all, of many as good as none."""
ODD_PER_S_MAX = 100.0
ODD_AT_ONCE_MAX = 200.0
"""Traces that are kept for what became of their requests, or because their clients ask for them. When everything
fails at once nobody looks at all of it, and the router has other things to do than to draw.
"""
CHOOSING_BITS = 64
"""Of a trace's id; their share of all that there are is compared with the ratio, as OpenTelemetry's samplers do."""


class Ration:
    """So many a second, and so many at once."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = 0.0

    def take(self, now: float) -> bool:
        """One of them, if one is left."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class TraceShare:
    """Asked once when a request begins, and once when it has ended. ``ratio`` 0: only what is odd."""

    __slots__ = ("_below", "_few", "_mask", "_odd")

    def __init__(self, ratio: float) -> None:
        self._mask = (1 << CHOOSING_BITS) - 1
        self._below = round(ratio * (1 << CHOOSING_BITS))
        self._few = Ration(FEW_PER_S, FEW_AT_ONCE) if ratio > 0.0 else Ration(0.0, 0.0)
        self._odd = Ration(ODD_PER_S_MAX, ODD_AT_ONCE_MAX)

    def chosen(self, trace_id: int, now: float) -> bool:
        """Whether a request of whom nobody has said anything is traced."""
        return (trace_id & self._mask) < self._below or self._few.take(now)

    def allowed(self, now: float) -> bool:
        """Whether there is room for one that is odd, or that is asked for."""
        return self._odd.take(now)
