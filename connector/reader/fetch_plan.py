"""Input of a fetch (plan and limits) and its output (messages and orders to send)."""

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
    """For a holder to reply. Without a reply the blocks are requested elsewhere or computed."""
    peer_s_max: float = 3.0
    """For a source to become connected."""
    hold_s: float = 10.0
    """Requested duration of a lease."""
    margin_s: float = 0.25
    """A read must end this long before its lease: clocks drift between handshakes."""


@dataclass(slots=True)
class Outbox:
    """What the caller is to send and do. The caller empties the lists."""

    lease_requests: list[LeaseKv] = field(default_factory=list)
    releases: list[ReleaseKv] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class FetchPlan:
    """What to fetch, from which sources, for which reader."""

    reader: PeerKey
    hashes: Sequence[bytes]
    """Full hashes of the prompt's blocks, from the first on."""
    start: int
    """Index of the first missing block."""
    goal: int
    """Index after the last block to fetch."""
    sources: list[Source]
    take: KvOffer | None = None
    follow_s: float = 30.0
    """Maximum wait for the next blocks of a followed source."""
    block_tokens: int
    limits: FetchLimits
    outbox: Outbox
    clock_ahead: Callable[[PeerKey], float | None]
    """The most that a peer's clock may be ahead of this one, seconds; None if it is not connected."""
    next_number: Callable[[], int]
    """Numbers unique among all fetches of this reader."""


def lease_message(plan: FetchPlan, request: LeaseRequest) -> LeaseKv:
    return LeaseKv(
        worker_id=WorkerId(request.peer[0]),
        epoch=Epoch(request.peer[1]),
        reader_id=WorkerId(plan.reader[0]),
        ask_id=request.lease_id,
        hashes=pack_full_hashes(plan.hashes[request.first : request.end]),
        hold_s=plan.limits.hold_s,
        follow_s=plan.follow_s if request.followed else 0.0,
    )


def release_message(plan: FetchPlan, request: LeaseRequest) -> ReleaseKv:
    ids = {"lease_ids": [request.lease_id]} if request.is_offer else {"ask_ids": [request.lease_id]}
    return ReleaseKv(
        worker_id=WorkerId(request.peer[0]), epoch=Epoch(request.peer[1]), reader_id=WorkerId(plan.reader[0]), **ids
    )
