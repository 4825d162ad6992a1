"""The KV exchange: leases on KV blocks by content, and what a reader must know of a holder.

reader                                             holder
  LeaseKv(hashes, hold_s, follow_s)   ──────►        the longest prefix that it holds is pinned
                          ◄──────   KvGrant          block ids, until when on its clock; more follow if asked to
  NIXL READ of those blocks           ◄══════        the holder's engine does nothing
  ReleaseKv                           ──────►        unpinned; or the holder's own clock ends it

A block is named by the engine's full chained hash (32 bytes), so equal names mean equal tokens before it, and equal KV.
Clocks are monotonic seconds of the machine named; a reader knows how far the holder's clock may be ahead of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

FULL_HASH_BYTES = 32
LEASE_BLOCKS_MAX = 16384
"""Blocks asked for by one LeaseKv; a longer prompt's rest is computed."""


def pack_full_hashes(hashes: Iterable[bytes]) -> bytes:
    """Full block hashes, one behind the other."""
    return b"".join(hashes)


def unpack_full_hashes(packed: bytes) -> list[bytes]:
    """The hashes in ``packed``. Raises ValueError when its length is no multiple of 32."""
    if len(packed) % FULL_HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of {FULL_HASH_BYTES}-byte hashes")
    return [packed[at : at + FULL_HASH_BYTES] for at in range(0, len(packed), FULL_HASH_BYTES)]


def pack_block_ids(ids: Iterable[int]) -> bytes:
    """Block numbers as 32-bit integers, little-endian on every machine that vLLM runs on."""
    return array("I", ids).tobytes()


def unpack_block_ids(packed: bytes) -> list[int]:
    """The block numbers in ``packed``. Raises ValueError when its length is no multiple of 4."""
    return array("I", packed).tolist()


class NoGrant(StrEnum):
    """Why a holder grants nothing, or nothing more."""

    NOT_HELD = "not_held"
    """The next block is not in its cache (any more)."""
    EPOCH = "epoch"
    """It is another life of the worker than the one that was asked."""
    FULL = "full"
    """Leases already pin as much of its memory as they may."""
    DRAINING = "draining"
    FOLLOW_OVER = "follow_over"
    """The blocks did not come while the holder was asked to follow."""
    UNREACHABLE = "unreachable"
    """Said by the reader's own side: nobody answered."""


class LeaseKv(Message, frozen=True, kw_only=True):
    """Reader -> holder: pin these blocks for me. Answered with one KvGrant or, when following, several."""

    worker_id: WorkerId
    epoch: Epoch
    reader_id: WorkerId
    ask_id: str
    """One subject token, unique for ever."""
    hashes: bytes
    """Full hashes of consecutive blocks of one chain."""
    hold_s: float
    """How long each granted block should stay; the holder may give less."""
    follow_s: float = 0.0
    """How long to wait for the next block that the holder computes, from each grant on; 0: grant what is there now."""


class KvGrant(Message, frozen=True, kw_only=True):
    """Holder -> reader: these blocks stay until ``until_s`` on the holder's clock."""

    reader_id: WorkerId
    worker_id: WorkerId
    epoch: Epoch
    ask_id: str
    lease_id: str = ""
    """Empty: nothing was pinned. All grants of one ask have the same."""
    first: int = 0
    """Index in the ask of the first block granted here; equal to how many were granted before."""
    block_ids: bytes = b""
    last_hash: bytes = b""
    """Full hash of the last block granted here."""
    until_s: float = 0.0
    clock_s: float = 0.0
    """The holder's clock when it granted."""
    final: bool = True
    """No more grants follow."""
    reason: NoGrant | None = None
    """Why there is no more, when less than asked for was granted in all."""
    prefill_cached_tokens: int = 0
    """Of the prompt that the holder computed while it was followed: how many tokens it had had in its cache."""


class ReleaseKv(Message, frozen=True, kw_only=True):
    """Reader -> holder: unpin, stop following. An unknown lease is ignored."""

    worker_id: WorkerId
    epoch: Epoch
    reader_id: WorkerId
    ask_ids: list[str] = msgspec.field(default_factory=list)
    lease_ids: list[str] = msgspec.field(default_factory=list)
    """For offers, which nobody asked for."""


class KvOffer(Message, frozen=True, kw_only=True):
    """A prefill leg's end: its prompt's full blocks, already leased to whoever names the lease."""

    worker_id: WorkerId
    epoch: Epoch
    lease_id: str
    block_ids: bytes
    """From the first block of the prompt on."""
    last_hash: bytes
    until_s: float


class KvSource(Message, frozen=True, kw_only=True):
    """Router -> worker: who is believed to hold part of this prompt."""

    worker_id: WorkerId
    epoch: Epoch
    first: int = 0
    """Index of the first block in the prompt that it should be asked for."""
    end: int = 0
    """Index behind the last one; 0: as far as the prompt goes."""
    follow: bool = False
    """It is about to compute the prompt: take its blocks as they come."""


class LegOrder(Message, frozen=True, kw_only=True):
    """Worker -> its engine, with each request: what to do about KV. Travels beside the body, never in it."""

    offer: bool = False
    """PREFILL: lease the prompt's blocks at the end, and say so in the transfer_report."""
    offer_id: str = ""
    """The offer's lease, named beforehand: unique for ever, so that it can be given back whatever became of the leg."""
    take: KvOffer | None = None
    """DECODE: read these."""
    sources: list[KvSource] = msgspec.field(default_factory=list)
    cache_hit_threshold: float = 0.0
    """Refuse when less than this share of the tokens is cached or can be fetched; 0: never."""
    fetch_min_tokens: int = 0
    """Fetching fewer tokens than this is not worth it."""
    wait_s_max: float = 30.0
    """For the next blocks of a source that is followed."""


class KvRead(Message, frozen=True, kw_only=True):
    """One source of one request: what was asked, granted and read. Instants are on the reader's clock, 0.0 if never."""

    worker_id: WorkerId
    epoch: Epoch
    tokens: int = 0
    """Whose KV arrived in time and is used."""
    bytes: int = 0
    asked_at: float = 0.0
    granted_at: float = 0.0
    """First grant with blocks; for an offer, when the request was first looked at."""
    read_at: float = 0.0
    ended_at: float = 0.0
    read_s: float = 0.0
    """Time in which at least one read was under way."""
    failure: str = ""
    """Why less came than was hoped for, in words."""
    followed: bool = False


class KvTransferReport(Message, frozen=True, kw_only=True):
    """Engine -> worker -> router: where each prompt token's KV came from. The first three add up to the prompt."""

    prompt_tokens: int = 0
    local_tokens: int = 0
    fetched_tokens: int = 0
    recomputed_tokens: int = 0
    """Computed on this worker: for a decode leg, no more than the tail of less than a block when all is well."""
    refetched_tokens: int = 0
    """Fetched again after a preemption."""
    reprefilled_tokens: int = 0
    """Computed again after a preemption."""
    preemptions: int = 0
    refused: bool = False
    """The cache hit threshold was not met."""
    prefill_cached_tokens: int = -1
    """DECODE of a followed prompt: what the prefill worker had in its cache; -1 when not known."""
    reads: list[KvRead] = msgspec.field(default_factory=list)
    offer: KvOffer | None = None


class FetchKv(Message, frozen=True, kw_only=True):
    """Anyone -> worker: have these blocks (prefetch, replicate, evacuate). No token is computed."""

    worker_id: WorkerId
    hashes: bytes
    """Full hashes of consecutive blocks from the start of a chain."""
    sources: list[KvSource]
    deadline_s: float


class FetchedKv(Message, frozen=True, kw_only=True):
    """How that went. ``held + fetched`` is the prefix that the worker now has."""

    held: int = 0
    fetched: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    """Why less came than was asked for, in words."""


class KvLedgerState(Message, frozen=True, kw_only=True):
    """What an engine has leased and is reading, now, and totals since it started."""

    leases: int = 0
    pinned_blocks: int = 0
    next_expiry_s: float = 0.0
    """When the next lease ends, on the engine's clock; 0.0: there is none."""
    reads: int = 0
    """Under way."""
    leases_granted_total: int = 0
    leases_released_total: int = 0
    leases_expired_total: int = 0
    leases_refused_total: int = 0
    reads_total: int = 0
    reads_failed_total: int = 0
    read_bytes_total: int = 0
    read_seconds_total: float = 0.0
    refused_requests_total: int = 0
    """By the cache hit threshold."""
    recomputed_tokens_total: int = 0
    """Of decode legs, beyond the tail of less than a block: silent re-prefill."""
