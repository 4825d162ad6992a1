"""What a fetch is about, its limits, and what it wants done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.core.asks import Source
from connector.core.orders import PeerKey, Read
from shared.contracts.kv_exchange import KvOffer, LeaseKv, ReleaseKv


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds."""

    answer_s_max: float = 0.5
    """For a holder to answer; after that it counts as silent."""
    peer_s_max: float = 3.0
    """For a source that is not connected yet."""
    hold_s: float = 10.0
    """How long leased blocks are asked to stay."""
    margin_s: float = 0.25
    """A read must be over so long before its lease: clocks drift, and reads take time."""


@dataclass(slots=True)
class Effects:
    """What is to be done, in order of kind; the shell empties the lists."""

    asks: list[LeaseKv] = field(default_factory=list)
    releases: list[ReleaseKv] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Plan:
    """What to fetch, from whom, on whose behalf."""

    reader: PeerKey
    hashes: Sequence[bytes]
    """Full hashes of the prompt's blocks, from the first on."""
    start: int
    """Index of the first block that is not held."""
    goal: int
    """Index behind the last one that is wanted."""
    sources: list[Source]
    take: KvOffer | None = None
    follow_s: float = 30.0
    block_tokens: int
    limits: Limits
    effects: Effects
    clock_ahead: Callable[[PeerKey], float | None]
    """How far a peer's clock may be ahead of ours, seconds; None: it is not connected."""
    next_number: Callable[[], int]
    """Unique among all fetches of this reader."""
