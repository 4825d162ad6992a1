"""One reader's dealings with one source for one run of blocks: asked, granted piece by piece, read, released."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from connector.orders import PeerKey
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who may be asked for which blocks."""

    peer: PeerKey
    first: int
    end: int
    follow: bool = False


@dataclass(slots=True)
class Segment:
    """Granted blocks that are not being read yet."""

    first: int
    """Index of the first one in the prompt."""
    block_ids: list[int]
    until_s: float
    """On the holder's clock."""


@dataclass(slots=True)
class ReadTotals:
    """What is told of an ask when all is over."""

    tokens: int = 0
    bytes: int = 0
    granted_at: float = 0.0
    read_at: float = 0.0
    ended_at: float = 0.0
    read_s: float = 0.0
    failure: str = ""

    def fail(self, failure: str) -> None:
        """The first reason is the one that counts."""
        self.failure = self.failure or failure

    def moved(self, started_s: float, ended_s: float, size: int) -> None:
        """A part was read; parts that overlap in time are counted once."""
        self.read_at = min(self.read_at, started_s) if self.read_at else started_s
        self.read_s += max(0.0, ended_s - max(started_s, self.ended_at))
        self.ended_at = max(self.ended_at, ended_s)
        self.bytes += size


@dataclass(slots=True, kw_only=True)
class LeaseRequest:
    """See the module. Block indices count from the start of the prompt."""

    ask_id: str
    peer: PeerKey
    first: int
    end: int
    asked_at: float
    overdue_at: float
    """When it is given up, on the reader's clock."""
    followed: bool = False
    is_offer: bool = False
    """``ask_id`` is the lease of an offer that nobody asked for."""
    open: bool = True
    """More grants may come."""
    released: bool = False
    granted_end: int = 0
    """Index behind the last block granted."""
    segments: deque[Segment] = field(default_factory=deque)
    reading: int = 0
    """Blocks being read."""
    story: ReadTotals = field(default_factory=ReadTotals)

    def granted(self, segment: Segment, now: float) -> None:
        """More blocks are leased."""
        self.segments.append(segment)
        self.granted_end = segment.first + len(segment.block_ids)
        self.story.granted_at = self.story.granted_at or now

    def close(self, failure: str = "") -> None:
        """Nothing more will be granted."""
        self.open = False
        self.story.fail(failure)

    @property
    def busy(self) -> bool:
        """Whether something of it is still to be read or being read."""
        return bool(self.open or self.segments or self.reading)

    def read(self) -> KvRead:
        """What came of it."""
        story = self.story
        return KvRead(
            worker_id=WorkerId(self.peer[0]),
            epoch=Epoch(self.peer[1]),
            tokens=story.tokens,
            bytes=story.bytes,
            asked_at=self.asked_at,
            granted_at=story.granted_at,
            read_at=story.read_at,
            ended_at=story.ended_at,
            read_s=story.read_s,
            failure=story.failure,
            followed=self.followed,
        )
