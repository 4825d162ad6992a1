"""Several tensor-parallel ranks read their share of each block: a part counts when the last rank has reported it, a
connection when all ranks have it, and no longer when one has lost it.
"""

from __future__ import annotations

from connector.orders import Connected, PeerKey, ReadPart, Results


class RankAggregation:
    """Collects what ranks report; the same part, and the same connection, comes once from each of ``ranks``."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: dict[tuple[int, int], list[ReadPart]] = {}
        self._connected: dict[PeerKey, list[Connected]] = {}

    def add(self, results: Results) -> Results:
        """What has become final with these."""
        if self._ranks == 1:
            return results
        final = Results()
        for part in results.parts:
            key = (part.read_id, part.first)
            shares = self._parts.setdefault(key, [])
            shares.append(part)
            if len(shares) == self._ranks:
                final.parts.append(_together(self._parts.pop(key)))
        for connected in results.connected:
            said = self._connected.setdefault(connected.peer, [])
            said.append(connected)
            if connected.failure or len(said) == self._ranks:
                del self._connected[connected.peer]
                seconds = max(one.seconds for one in said)
                final.connected.append(Connected(connected.peer, seconds, connected.failure))
        return final


def _together(parts: list[ReadPart]) -> ReadPart:
    """All ranks' shares as one: failed if any is, over when the last one is."""
    return ReadPart(
        read_id=parts[0].read_id,
        first=parts[0].first,
        count=parts[0].count,
        bytes=sum(part.bytes for part in parts),
        started_s=min(part.started_s for part in parts),
        ended_s=max(part.ended_s for part in parts),
        failure=next((part.failure for part in parts if part.failure), ""),
    )
