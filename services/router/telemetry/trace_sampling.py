"""Which requests are traced: a share chosen at the start, and unusual ones (failed, slow, resumed) chosen at the end.

Rate limits bound both, so that tracing stays cheap. A single request is always traced; an unusual one is traced unless
there are too many of them.
"""

from __future__ import annotations

FEW_PER_S = 0.2
FEW_AT_ONCE = 10.0
"""Requests traced in addition to the share: all of them at low traffic, a negligible part at high traffic."""
ODD_PER_S_MAX = 100.0
ODD_AT_ONCE_MAX = 200.0
"""Limits on traces kept for unusual requests or because clients ask for them. When every request fails, more traces
would not help an operator, and the router needs its CPU for requests.
"""
CHOOSING_BITS = 64
"""Low bits of the trace id that are compared with the sample ratio, as OpenTelemetry's TraceIdRatioBased does."""


class TokenBucket:
    """Allows ``per_s`` a second on average, and ``most`` at once."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take one, if one is left."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class TraceShare:
    """Asked when a request begins and when it has ended. With ``ratio`` 0 only unusual requests are traced."""

    __slots__ = ("_below", "_few", "_mask", "_odd")

    def __init__(self, ratio: float) -> None:
        self._mask = (1 << CHOOSING_BITS) - 1
        self._below = round(ratio * (1 << CHOOSING_BITS))
        self._few = TokenBucket(FEW_PER_S, FEW_AT_ONCE) if ratio > 0.0 else TokenBucket(0.0, 0.0)
        self._odd = TokenBucket(ODD_PER_S_MAX, ODD_AT_ONCE_MAX)

    def chosen(self, trace_id: int, now: float) -> bool:
        """Whether a request without a client's trace context is traced from its start."""
        return (trace_id & self._mask) < self._below or self._few.take(now)

    def allowed(self, now: float) -> bool:
        """Whether one more unusual request, or one that its client wants traced, may be traced."""
        return self._odd.take(now)
