"""Orders of the scheduler role to the worker role, and its results. The roles may be in different processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.messages import Peer

PeerKey = tuple[str, int]
"""Worker id and epoch. A restarted worker has a greater epoch."""


@dataclass(slots=True)
class Read:
    """Read these blocks from a peer."""

    read_id: int
    peer: PeerKey
    remote_blocks: list[int]
    local_blocks: list[int]
    """Destinations, one for each remote block."""
    until_s: float
    """On the reader's clock, with margins subtracted: bytes that arrive later do not count."""


@dataclass(slots=True)
class Orders:
    """Orders of one step."""

    connect: list[Peer] = field(default_factory=list)
    forget: list[PeerKey] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    """Reads that are not needed any more. They are still reported, when no byte of them can move."""

    def __bool__(self) -> bool:
        return bool(self.connect or self.forget or self.reads or self.cancel)


@dataclass(slots=True)
class Connected:
    """The end of a connection attempt of one rank."""

    peer: PeerKey
    seconds: float
    failure: str = ""


@dataclass(slots=True)
class ReadPart:
    """Consecutive blocks of a read that arrived or failed. No byte of them moves after this report."""

    read_id: int
    first: int
    """Index in the read's block lists."""
    count: int
    bytes: int
    started_s: float
    ended_s: float
    failure: str = ""


@dataclass(slots=True)
class Results:
    """Results of one step, of one rank or, after ``RankAggregation``, of all."""

    connected: list[Connected] = field(default_factory=list)
    parts: list[ReadPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.connected or self.parts)
