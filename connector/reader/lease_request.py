"""One lease request of a reader to one source: granted in one or more segments, read, released."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from connector.groups import Blocks
from connector.messages import PeerKey
from shared.contracts.ids import NO_LEG, Epoch, LegId, WorkerId
from shared.contracts.kv_exchange import KvRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A worker that may hold the KV of the prompt's tokens from ``first`` to ``end``."""

    peer: PeerKey
    first: int
    end: int
    follow: bool = False
    leg_id: LegId = NO_LEG
    """Leg that computes the prompt, with ``follow``."""
    worth_s: float = 0.0
    """``KvSource.worth_s``."""


@dataclass(slots=True)
class Segment:
    """Granted blocks whose read has not begun."""

    blocks: list[Blocks]
    until_s: float
    """Instant on the holder's clock."""


@dataclass(slots=True)
class ReadTotals:
    """Totals of a lease request, for the transfer report."""

    tokens: int = 0
    bytes: int = 0
    granted_at: float = 0.0
    read_at: float = 0.0
    ended_at: float = 0.0
    read_s: float = 0.0
    failure: str = ""

    def fail(self, failure: str) -> None:
        """Keep the first reason."""
        self.failure = self.failure or failure

    def moved(self, started_s: float, ended_s: float, size: int) -> None:
        """A part was read. Time in which parts overlap counts once."""
        self.read_at = min(self.read_at, started_s) if self.read_at else started_s
        self.read_s += max(0.0, ended_s - max(started_s, self.ended_at))
        self.ended_at = max(self.ended_at, ended_s)
        self.bytes += size


@dataclass(slots=True, kw_only=True)
class LeaseRequest:
    """Positions are in tokens from the start of the prompt."""

    lease_id: str
    peer: PeerKey
    first: int
    """The request is for full attention from here on."""
    end: int
    requested_at: float
    overdue_at: float
    """Instant of giving up, on the reader's clock."""
    followed: bool = False
    leg_id: LegId = NO_LEG
    load_s: float = 0.0
    """``LeaseKv.load_s``."""
    listens: bool = False
    """Whether grants may come as notices."""
    numbered: int = 0
    """Grants taken that have a number."""
    is_offer: bool = False
    """``lease_id`` is that of an offer: the lease was granted without a request."""
    open: bool = True
    """More grants may come."""
    released: bool = False
    granted_end: int = 0
    segments: deque[Segment] = field(default_factory=deque)
    reading: int = 0
    """Blocks that are being read."""
    totals: ReadTotals = field(default_factory=ReadTotals)

    def granted(self, segment: Segment, end: int, now: float) -> None:
        """``end``: full attention is granted up to here."""
        self.segments.append(segment)
        self.granted_end = end
        self.totals.granted_at = self.totals.granted_at or now

    def close(self, failure: str = "") -> None:
        """Expect no more grants."""
        self.open = False
        self.totals.fail(failure)

    @property
    def busy(self) -> bool:
        """Whether grants or reads may still come."""
        return bool(self.open or self.segments or self.reading)

    def read(self) -> KvRead:
        totals = self.totals
        return KvRead(
            worker_id=WorkerId(self.peer[0]),
            epoch=Epoch(self.peer[1]),
            tokens=totals.tokens,
            bytes=totals.bytes,
            requested_at=self.requested_at,
            granted_at=totals.granted_at,
            read_at=totals.read_at,
            ended_at=totals.ended_at,
            read_s=totals.read_s,
            failure=totals.failure,
            followed=self.followed,
        )
