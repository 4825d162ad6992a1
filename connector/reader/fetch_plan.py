"""What a fetch is about, its limits, and what it wants done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.orders import PeerKey, Read
from connector.reader.lease_request import LeaseRequest, Source
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvOffer, LeaseKv, ReleaseKv, pack_full_hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
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
class Outbox:
    """What is to be done, in order of kind; the shell empties the lists."""

    lease_requests: list[LeaseKv] = field(default_factory=list)
    releases: list[ReleaseKv] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class FetchPlan:
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
    limits: FetchLimits
    outbox: Outbox
    clock_ahead: Callable[[PeerKey], float | None]
    """How far a peer's clock may be ahead of ours, seconds; None: it is not connected."""
    next_number: Callable[[], int]
    """Unique among all fetches of this reader."""


def lease_of(plan: FetchPlan, ask: LeaseRequest) -> LeaseKv:
    """The ask, in the words of the exchange."""
    return LeaseKv(
        worker_id=WorkerId(ask.peer[0]),
        epoch=Epoch(ask.peer[1]),
        reader_id=WorkerId(plan.reader[0]),
        ask_id=ask.ask_id,
        hashes=pack_full_hashes(plan.hashes[ask.first : ask.end]),
        hold_s=plan.limits.hold_s,
        follow_s=plan.follow_s if ask.followed else 0.0,
    )


def release_of(plan: FetchPlan, ask: LeaseRequest) -> ReleaseKv:
    """The end of the ask, in the words of the exchange."""
    ids = {"lease_ids": [ask.ask_id]} if ask.is_offer else {"ask_ids": [ask.ask_id]}
    return ReleaseKv(
        worker_id=WorkerId(ask.peer[0]), epoch=Epoch(ask.peer[1]), reader_id=WorkerId(plan.reader[0]), **ids
    )
