"""Bounds between the monotonic clocks of the hosts of one engine.

Leases end at instants of the scheduler's clock. A rank on another host has a clock of its own, which may be hours away.
It says from time to time what its clock shows. Its message takes some time, so when the scheduler receives it, the
rank's clock is at least as far ahead as the difference: how long the message took does not matter. A rank that takes
the scheduler's clock for its own minus this bound never takes a lease for longer than it is.
"""

from __future__ import annotations

DRIFT = 0.001
"""Seconds by which two clocks may move apart in a second; the kernel changes the rate of each by at most half of it."""
KEPT_S = 60.0
"""A bound is used for so long; then the next message counts, since a host may have been suspended."""


class NodeClocks:
    """Nodes are the numbers of hosts in their engine."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, float]] = {}
        """How far the clock is ahead at least, in seconds, and when that was heard."""

    def heard(self, node: int, clock_s: float, now: float) -> None:
        """The node's clock showed ``clock_s`` when it said so; ``now`` is the scheduler's clock."""
        known = self._heard.get(node)
        ahead_s = clock_s - now
        if known is None or now - known[1] > KEPT_S or ahead_s >= _bound(known, now):
            self._heard[node] = (ahead_s, now)

    def ahead_s(self, now: float) -> dict[int, float]:
        """How many seconds each node's clock is ahead, at least; negative for one behind."""
        return {node: _bound(known, now) for node, known in self._heard.items()}


def _bound(known: tuple[float, float], now: float) -> float:
    ahead_s, heard_at = known
    return ahead_s - DRIFT * (now - heard_at)
