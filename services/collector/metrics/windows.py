"""Totals that survive restarts of their source, rates over a sliding window, histograms, label sets.

Times are seconds on the collector's monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence

from shared.contracts.ids import Epoch

WINDOW_S = 10
"""Default window of a rate."""
OTHER = "other"
"""Replaces every label value beyond a set's maximum."""


class Rate:
    """Amount per second over the last ``window_s`` seconds, kept in one-second slots."""

    __slots__ = ("_begun", "_slots", "_sum", "_window_s")

    def __init__(self, now: float, window_s: int = WINDOW_S) -> None:
        self._window_s = window_s
        self._begun = now
        self._slots: deque[tuple[int, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        second = int(now)
        if self._slots and self._slots[-1][0] == second:
            amount_before = self._slots.pop()[1]
            self._sum -= amount_before
            amount += amount_before
        self._slots.append((second, amount))
        self._sum += amount
        self._forget(now)

    def per_second(self, now: float) -> float:
        """The mean rate. A source younger than the window is averaged over its age, but at least one second."""
        self._forget(now)
        if not self._slots:
            # Reset the rounding error that additions and subtractions leave in the sum.
            self._sum = 0.0
        return max(0.0, self._sum) / min(float(self._window_s), max(1.0, now - self._begun))

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= int(now) - self._window_s:
            self._sum -= self._slots.popleft()[1]


class Totals:
    """Counters of a source that restart from zero with each epoch; ``values`` never decreases."""

    __slots__ = ("_epoch", "_last", "values")

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self._last: Mapping[str, float] = {}
        self.values: dict[str, float] = {}
        """Sums over all epochs."""

    def grow(self, epoch: Epoch, totals: Mapping[str, float]) -> dict[str, float]:
        """The increase since the last call; at the first call, everything. An older epoch adds nothing."""
        if self._epoch is not None and epoch < self._epoch:
            return dict.fromkeys(totals, 0.0)
        before: Mapping[str, float] = self._last if epoch == self._epoch else {}
        growth = {name: max(0.0, total - before.get(name, 0.0)) for name, total in totals.items()}
        self._epoch = epoch
        # A total that decreases within an epoch is a late message: the highest value counts.
        self._last = {name: max(total, before.get(name, 0.0)) for name, total in totals.items()}
        for name, amount in growth.items():
            self.values[name] = self.values.get(name, 0.0) + amount
        return growth


class Histogram:
    """Counts per bucket. ``counts`` has one bucket more than there are bounds."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value; a value equal to a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value


class LabelSet:
    """The first ``values_max`` values keep their name; all later ones become ``other``."""

    __slots__ = ("_known", "values_max")

    def __init__(self, values_max: int) -> None:
        self.values_max = values_max
        self._known: set[str] = set()

    def bounded(self, value: str) -> str:
        """``value`` itself, or ``other``."""
        if value not in self._known:
            if len(self._known) >= self.values_max:
                return OTHER
            self._known.add(value)
        return value
