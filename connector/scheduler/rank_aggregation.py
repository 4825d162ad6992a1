"""Joins the reports of tensor-parallel ranks, each of which reads its share of each block.

A read part is final when the last rank has reported it; a peer is connected when all ranks are, and lost when one rank
has lost it.
"""

from __future__ import annotations

from connector.messages import Connected, PeerKey, ReadPart, Results


class RankAggregation:
    """Each of ``ranks`` reports each part and each connection once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: dict[tuple[int, int], list[ReadPart]] = {}
        self._connected: dict[PeerKey, list[Connected]] = {}

    def add(self, results: Results) -> Results:
        """Add one rank's results; returns what has become final with them."""
        if self._ranks == 1:
            return results
        final = Results()
        for part in results.parts:
            key = (part.read_id, part.first)
            shares = self._parts.setdefault(key, [])
            shares.append(part)
            if len(shares) == self._ranks:
                final.parts.append(_joined(self._parts.pop(key)))
        for connected in results.connected:
            reports = self._connected.setdefault(connected.peer, [])
            reports.append(connected)
            if connected.failure or len(reports) == self._ranks:
                del self._connected[connected.peer]
                seconds = max(one.seconds for one in reports)
                final.connected.append(Connected(connected.peer, seconds, connected.failure))
        return final


def _joined(parts: list[ReadPart]) -> ReadPart:
    """One part from all ranks' shares: failed if any failed, ended with the last."""
    return ReadPart(
        read_id=parts[0].read_id,
        first=parts[0].first,
        count=parts[0].count,
        bytes=sum(part.bytes for part in parts),
        started_s=min(part.started_s for part in parts),
        ended_s=max(part.ended_s for part in parts),
        failure=next((part.failure for part in parts if part.failure), ""),
    )
