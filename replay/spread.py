"""Percentiles of a measure, where requests that were never served count as infinitely late."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles and mean of one measure, in seconds."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


NEVER = Spread(mean=inf, p50=inf, p95=inf, p99=inf)
"""Spread of requests of which none was served."""


def spread_of(values: Sequence[float], never: int = 0) -> Spread:
    """Percentiles by nearest rank; ``never`` further values count as infinite, except in the mean."""
    if not values:
        return NEVER if never else Spread()
    ordered = sorted(values) + [inf] * never
    return Spread(mean=sum(values) / len(values), **{f"p{p}": ordered[rank(len(ordered), p)] for p in (50, 95, 99)})


def rank(count: int, percent: int) -> int:
    """Index of a percentile among ``count`` sorted values."""
    return min(count - 1, -(-count * percent // 100) - 1)
