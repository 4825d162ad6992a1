"""What the scheduler role orders of the worker role, and what that reports: they may be on different processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.messages import Peer

PeerKey = tuple[str, int]
"""Worker id and epoch: one life of a worker."""


@dataclass(slots=True)
class Read:
    """Read these blocks from that peer."""

    read_id: int
    peer: PeerKey
    remote_blocks: list[int]
    local_blocks: list[int]
    """As many; each is written with the remote block at the same place."""
    until_s: float
    """On the reader's clock, margins taken off: bytes that arrive later do not count."""


@dataclass(slots=True)
class Orders:
    """For one step."""

    connect: list[Peer] = field(default_factory=list)
    forget: list[PeerKey] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    """Reads that nobody wants any more; they are still reported when they are truly over."""

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
    """Consecutive blocks of one read are final: they arrived, or never will. No byte moves after this is said."""

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
    """Of one step, of one rank or of several: a part that all ranks have read counts (see ``ranks``)."""

    connected: list[Connected] = field(default_factory=list)
    parts: list[ReadPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.connected or self.parts)
