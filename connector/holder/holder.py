"""The holder's side of the exchange: pins blocks of vLLM's pool for readers, by content, on the scheduler's thread.

Blocks are pinned with ``BlockPool.touch`` and freed with ``free_blocks``, never through requests, so that an engine
with leases and nothing else to do sleeps. A reader trusts a grant until its instant without asking again; that is why a
pin ends early only by the reader's own release, or when nobody will write into the blocks any more.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from msgspec.structs import replace

from connector.holder.leases import ANYONE, FollowedPrompt, Lease, LeaseLimits, LeaseTable
from connector.holder.pending_writes import PendingWrites, Step
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    FULL_HASH_BYTES,
    LEASE_BLOCKS_MAX,
    KvGrant,
    KvOffer,
    LeaseKv,
    NoGrant,
    ReleaseKv,
    pack_block_ids,
    unpack_full_hashes,
)

PROMPTS_NOTED_MAX = 1024
"""Prompts whose cached tokens are remembered for those who follow them."""
FOLLOW_S_MAX = 300.0
"""Longest time to wait for the next block of an ask, whatever it says."""
FULL_S_MAX = 0.5
"""How long an ask that is followed waits for others' leases to end: they may be waiting for its own."""
GROUPS = [0]
"""The one KV cache group of the models that the exchange supports."""


class Pool(Protocol):
    """vLLM's BlockPool."""

    blocks: Sequence[Any]  # KVCacheBlock by its ``block_id``.
    enable_caching: bool

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class HolderSettings:
    """Who holds, and how much of its memory for how long."""

    worker_id: WorkerId
    epoch: Epoch
    lease_s: float = 10.0
    """How long an offer lasts."""
    lease_s_max: float = 30.0
    lease_share_max: float = 0.5
    """Of the pool's blocks, that leases may pin."""


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """As in ``KvLedgerState``."""

    leases: int
    pinned_blocks: int
    next_expiry_s: float
    granted_total: int
    released_total: int
    expired_total: int
    refused_total: int


class Holder:
    """Answers asks, makes offers, and ends all of them in time. Call ``bind`` first."""

    def __init__(self, settings: HolderSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._draining = False
        self._offers = 0
        self._prompts: OrderedDict[bytes, int] = OrderedDict()
        self._pool: Pool
        self._leases = LeaseTable(LeaseLimits(pinned_blocks_max=0))
        self._pending_writes = PendingWrites(blocks=0, block_size=1)

    def bind(self, pool: Pool, block_size: int) -> None:
        """The engine's blocks, once, before anything else."""
        self._pool = pool
        self._leases = LeaseTable(LeaseLimits(pinned_blocks_max=int(len(pool.blocks) * self._settings.lease_share_max)))
        self._pending_writes = PendingWrites(len(pool.blocks), block_size)

    @property
    def has_followed(self) -> bool:
        """Whether ``advance`` may have something to grant after any step."""
        return bool(self._leases.followed)

    def lease(self, request: LeaseKv) -> KvGrant:
        """Pin what is held of it now. Not ``final``: ``advance`` grants the rest as it is computed."""
        refusal = self._refusal(request)
        hashes = _hashes(request) if refusal is None else None
        if not hashes or not request.hold_s > 0 or self._leases.find(request.ask_id) is not None:
            self._leases.totals.refused += 1
            return self._empty_grant(request.ask_id, request.reader_id, 0, refusal or NoGrant.NOT_HELD)
        now = self._now()
        following = FollowedPrompt(
            hashes=hashes,
            hold_s=min(request.hold_s, self._settings.lease_s_max),
            until_s=now + min(request.follow_s, FOLLOW_S_MAX),
            follow_s=min(request.follow_s, FOLLOW_S_MAX),
        )
        grant = self._grant(request.ask_id, request.reader_id, following, self._ready(following))
        if request.follow_s > 0:
            if grant.reason is None:
                return replace(grant, prefill_cached_tokens=self._noted(following))
            if self._pool.enable_caching and self._leases.follow(request.ask_id, request.reader_id, following):
                return replace(grant, lease_id=request.ask_id, final=False, reason=None)
        if not following.granted:
            self._leases.totals.refused += 1
        return grant

    def release(self, release: ReleaseKv) -> None:
        """A reader needs these no more. What is not known, or not that reader's, is ignored.

        A release that overtakes its ask is ignored too: that lease ends by its own clock.
        """
        if (release.worker_id, release.epoch) != (self._settings.worker_id, self._settings.epoch):
            return
        for lease_id in (*release.ask_ids, *release.lease_ids):
            self._free(self._leases.release(lease_id, release.reader_id))

    def offer(self, hashes: Sequence[bytes], block_ids: Sequence[int], offer_id: str = "") -> KvOffer | None:
        """Pin the full blocks of a prompt that is computed, as many as there is room for. None: there is no room."""
        held = list(block_ids[: min(len(hashes), LEASE_BLOCKS_MAX)])
        if not held:
            return None
        room = 0 if self._draining or self._leases.is_full() else self._leases.room_for(held)
        if not room:
            self._leases.totals.refused += 1
            return None
        self._offers += 1
        settings = self._settings
        lease_id = offer_id or f"{settings.worker_id}-{settings.epoch}-{self._offers}"
        until_s = self._now() + min(settings.lease_s, settings.lease_s_max)
        blocks = self._pool.blocks
        self._pin(lease_id, ANYONE, [blocks[block_id] for block_id in held[:room]], until_s)
        return KvOffer(
            worker_id=settings.worker_id,
            epoch=settings.epoch,
            lease_id=lease_id,
            block_ids=pack_block_ids(held[:room]),
            last_hash=bytes(hashes[room - 1]),
            until_s=until_s,
        )

    def scheduled(self, step: Step) -> None:
        """A step was scheduled: vLLM has named its blocks, and their KV is not there yet."""
        self._pending_writes.scheduled(step)

    def computed(self, step: Step) -> None:
        """That step's output is here. Call before the scheduler acts on it."""
        self._pending_writes.computed(step)

    def advance(self) -> list[KvGrant]:
        """After a step, or when woken: end what is over, and grant what became ready for those who follow."""
        now = self._now()
        self._free(self._leases.expire(now))
        if not self._leases.followed:
            return []
        further = (self._grant_further(lease, now) for lease in list(self._leases.followed.values()))
        return [grant for grant in further if grant is not None]

    def note_prompt(self, last_full_hash: bytes, cached_tokens: int) -> None:
        """How much of a prompt was cached when it was scheduled here; told to those who follow it to the end."""
        self._prompts[last_full_hash] = cached_tokens
        self._prompts.move_to_end(last_full_hash)
        if len(self._prompts) > PROMPTS_NOTED_MAX:
            self._prompts.popitem(last=False)

    def release_all(self) -> None:
        """Before the engine ends: unpin everything, grant nothing more; ``advance`` tells those who follow.

        Readers still trust what they were granted, so the engine must compute nothing after this. It is no help in
        resetting the prefix cache either: vLLM resets the pool first, and that fails while blocks are pinned. The
        connector's ``reset_cache`` answers False while anything is leased, and the caller tries again after
        ``next_expiry_s``.
        """
        self._draining = True
        self._free(self._leases.unpin_all())

    @property
    def counts(self) -> LeaseCounts:
        """The leases now."""
        leases, totals = self._leases, self._leases.totals
        next_expiry_s = leases.next_expiry()
        return LeaseCounts(
            leases=len(leases),
            pinned_blocks=leases.pinned_blocks,
            next_expiry_s=0.0 if next_expiry_s == math.inf else next_expiry_s,
            granted_total=totals.granted,
            released_total=totals.released,
            expired_total=totals.expired,
            refused_total=totals.refused,
        )

    def _refusal(self, request: LeaseKv) -> NoGrant | None:
        if (request.worker_id, request.epoch) != (self._settings.worker_id, self._settings.epoch):
            return NoGrant.EPOCH
        if self._draining:
            return NoGrant.DRAINING
        return NoGrant.FULL if self._leases.is_full() else None

    def _ready(self, following: FollowedPrompt) -> list[Any]:
        """The next blocks that are held and computed, without a gap."""
        find, writes = self._pool.get_cached_block, self._pending_writes.writes
        ready = []
        for block_hash in islice(following.hashes, following.granted, None):
            cached = find(block_hash, GROUPS)
            if cached is None or writes(cached[0].block_id):
                break
            ready.append(cached[0])
        return ready

    def _grant(self, lease_id: str, reader_id: WorkerId, following: FollowedPrompt, ready: list[Any]) -> KvGrant:
        """Pin of these blocks what there is room for, and say so; with a reason when it is not all that was asked."""
        held = ready[: self._leases.room_for([block.block_id for block in ready])]
        first = following.granted
        following.granted += len(held)
        reason = None
        if following.granted < len(following.hashes):
            reason = NoGrant.FULL if len(held) < len(ready) else NoGrant.NOT_HELD
        empty = self._empty_grant(lease_id, reader_id, first, reason)
        if not held:
            return empty
        until_s = empty.clock_s + following.hold_s
        return replace(
            empty,
            lease_id=lease_id,
            block_ids=pack_block_ids(self._pin(lease_id, reader_id, held, until_s)),
            last_hash=following.hashes[following.granted - 1],
            until_s=until_s,
        )

    def _empty_grant(self, ask_id: str, reader_id: WorkerId, first: int, reason: NoGrant | None) -> KvGrant:
        """A grant of nothing."""
        return KvGrant(
            reader_id=reader_id,
            worker_id=self._settings.worker_id,
            epoch=self._settings.epoch,
            ask_id=ask_id,
            first=first,
            clock_s=self._now(),
            reason=reason,
        )

    def _grant_further(self, lease: Lease, now: float) -> KvGrant | None:
        following = lease.following
        assert following is not None
        if self._draining or now >= following.until_s:
            self._leases.stop_following(lease.lease_id)
            reason = NoGrant.DRAINING if self._draining else NoGrant.FOLLOW_OVER
            last = self._empty_grant(lease.lease_id, lease.reader_id, following.granted, reason)
            return replace(last, lease_id=lease.lease_id, prefill_cached_tokens=self._noted(following))
        ready = self._ready(following)
        if not ready:
            return None
        grant = self._grant(lease.lease_id, lease.reader_id, following, ready)
        following.progress(now, granted=bool(grant.block_ids))
        if grant.reason is None or now >= following.stuck_since_s + FULL_S_MAX:
            self._leases.stop_following(lease.lease_id)
            return replace(grant, lease_id=lease.lease_id, prefill_cached_tokens=self._noted(following))
        return replace(grant, final=False, reason=None) if grant.block_ids else None

    def _pin(self, lease_id: str, reader_id: WorkerId, blocks: list[Any], until_s: float) -> list[int]:
        block_ids = [block.block_id for block in blocks]
        self._pool.touch(blocks)
        self._leases.grant(lease_id, reader_id, block_ids, until_s)
        return block_ids

    def _free(self, block_ids: list[int]) -> None:
        """Last blocks first, as vLLM does: the ends of prompts are evicted before their beginnings."""
        if block_ids:
            self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def _noted(self, following: FollowedPrompt) -> int:
        return self._prompts.get(following.hashes[-1], 0)


def _hashes(request: LeaseKv) -> list[bytes] | None:
    """None: no reader of ours asks like this."""
    if not 0 < len(request.hashes) <= LEASE_BLOCKS_MAX * FULL_HASH_BYTES or len(request.hashes) % FULL_HASH_BYTES:
        return None
    return unpack_full_hashes(request.hashes)
