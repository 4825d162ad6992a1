"""The holder: pins blocks of vLLM's pool for readers, by content, on the scheduler's thread.

A model with one group of full attention lends any prefix of whole blocks, and each chunk of a prompt that it computes.
A model with other groups lends boundaries (see ``holder.boundaries``): of a prompt that it computes, full attention
goes ahead, and the last grant has the blocks of the other groups, all or none.

Blocks are pinned with ``BlockPool.touch`` and freed with ``free_blocks``. vLLM's own way, to delay the free of a
finished request, would keep EngineCore stepping about 1,000 times a second until the last lease ends; an engine that
only holds leases must sleep.

A reader relies on a grant until its expiry without asking again, and reads without the holder's knowledge. So a pin
ends early in two cases only: the reader releases it, or the engine will never write into its blocks again
(``release_all``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

from msgspec.structs import replace

from connector.groups import GroupPlan
from connector.holder.boundaries import TRIED_MAX, Boundaries, FindBoundary, Part
from connector.holder.leases import ANYONE, FollowedPrompt, Lease, LeaseLimits, LeaseTable
from connector.holder.pending_writes import PendingWrites
from shared.bounded import Bounded
from shared.contracts.ids import NO_LEG, Epoch, LegId, WorkerId
from shared.contracts.kv_exchange import (
    CHAIN_BLOCKS_MAX,
    FULL_HASH_BYTES,
    GROUP,
    LEASE_BLOCKS_MAX,
    PROMPT_TOKENS_MAX,
    FirstToken,
    GroupBlocks,
    KvGrant,
    KvOffer,
    LeaseKv,
    NoGrant,
    ReleaseKv,
    new_lease_id,
    pack_block_ids,
    unpack_full_hashes,
)

PROMPTS_NOTED_MAX = 1024
"""Prompts of which the number of cached tokens is kept, to report it to readers that follow them."""
ENDED_LEGS_NOTED_MAX = 1024
"""Ended prefill legs that are remembered, for lease requests that arrive after them."""
UNWANTED_OFFERS_NOTED_MAX = 1024
"""Releases of offers that are remembered, because the offer may be made after them."""
FOLLOW_S_MAX = 300.0
"""Maximum of ``LeaseKv.follow_s``."""
FULL_S_MAX = 0.5
"""How long a followed prompt waits for other leases to end when memory is full. Two followed prompts may each wait for
memory that the other pins, and would then wait until both leases expire.
"""
NO_LEASES = 0, 0, 0.0
"""``Holder.lease_state`` of most steps."""


class Pool(Protocol):
    """The part of vLLM's BlockPool that the holder uses."""

    blocks: Sequence[Any]  # KVCacheBlock by its ``block_id``.
    enable_caching: bool

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class HolderSettings:
    """Identity of the holder and limits of its leases."""

    worker_id: WorkerId
    epoch: Epoch
    lease_s: float = 10.0
    """Duration of an offer."""
    lease_s_max: float = 30.0
    lease_share_max: float = 0.5
    """Share of the pool's blocks that leases may pin."""


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """As in ``KvExchangeState``."""

    leases: int
    pinned_blocks: int
    next_expiry_s: float
    granted_total: int
    released_total: int
    expired_total: int
    refused_total: int


class Holder:
    """Grants leases, makes offers, and ends both on time. Call ``bind`` first."""

    def __init__(self, settings: HolderSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._draining = False
        self._prompts = Bounded[bytes, tuple[LegId, int]](PROMPTS_NOTED_MAX)
        self._ended_legs = Bounded[LegId, None](ENDED_LEGS_NOTED_MAX)
        self._first_tokens = Bounded[LegId, FirstToken](ENDED_LEGS_NOTED_MAX)
        self._unwanted_offers = Bounded[str, None](UNWANTED_OFFERS_NOTED_MAX)
        self._pool: Pool
        self._on_freed: Callable[[list[int]], None]
        self.groups = GroupPlan([], 1, 1)
        self._full: list[int] = []
        """Groups with full attention that goes ahead."""
        self._full_block_size = 1
        self._full_hashes = 1
        """Hashes of a full-attention block."""
        self._boundaries: Boundaries | None = None
        """None: every end of a block is one."""
        self.blocks = 0
        """Blocks of the pool."""
        self._leases = LeaseTable(LeaseLimits(pinned_blocks_max=0))
        self._pending_writes = PendingWrites(blocks=0)

    def bind(
        self,
        pool: Pool,
        groups: GroupPlan,
        find_boundary: FindBoundary | None = None,
        on_freed: Callable[[list[int]], None] = lambda _block_ids: None,
    ) -> None:
        """Set the engine's blocks. Called once, before all other methods. ``find_boundary``: needed
        unless each prefix of the blocks is of use. ``on_freed`` gets the blocks of leases that have ended, once freed.
        """
        self._pool = pool
        self._on_freed = on_freed
        self.groups = groups
        self._full = groups.ahead
        if self._full:
            self._full_block_size = groups.groups[self._full[0]].block_size
            self._full_hashes = self._full_block_size // groups.unit
        self.blocks = len(pool.blocks)
        self._leases = LeaseTable(LeaseLimits(pinned_blocks_max=int(self.blocks * self._settings.lease_share_max)))
        self._pending_writes = PendingWrites(self.blocks)
        if not groups.keeps_prefix:
            assert find_boundary is not None
            self._boundaries = Boundaries(groups, pool, find_boundary, self._leases, self._pending_writes)

    @property
    def has_leases(self) -> bool:
        return bool(self._leases)

    @property
    def has_followed(self) -> bool:
        """Whether any step may make blocks ready that ``advance`` can grant."""
        return bool(self._leases.followed)

    def lease(self, request: LeaseKv) -> KvGrant:
        """Pin the longest prefix that is cached and computed. If the grant is not ``final``, ``advance`` grants the
        rest as it is computed.
        """
        refusal = self._refusal(request)
        hashes = self._hashes_of(request) if refusal is None else None
        if not hashes or not request.hold_s > 0 or self._leases.find(request.ask_id) is not None:
            self._leases.totals.refused += 1
            return self._empty_grant(request.ask_id, request.reader_id, refusal or NoGrant.NOT_HELD)
        now, leg_ended = self._now(), request.leg_id in self._ended_legs
        size = self._full_block_size
        followed = FollowedPrompt(
            hashes=hashes,
            first=request.first,
            full_tokens=max(request.first * self.groups.unit, request.have // size * size),
            end=_end_of(request, (request.first + len(hashes)) * self.groups.unit),
            hold_s=min(request.hold_s, self._settings.lease_s_max),
            until_s=now + min(request.follow_s, FOLLOW_S_MAX),
            follow_s=min(request.follow_s, FOLLOW_S_MAX),
            leg_id=request.leg_id,
        )
        follows = request.follow_s > 0
        tries = 0 if follows and not leg_ended else TRIED_MAX
        grant = self._next_grant(request.ask_id, request.reader_id, followed, tries)
        grant = grant or self._empty_grant(request.ask_id, request.reader_id, NoGrant.NOT_HELD)
        if follows:
            if grant.reason is None or (grant.reason is NoGrant.NOT_HELD and leg_ended):
                return self._last(grant, followed)
            if self._pool.enable_caching and self._leases.follow(request.ask_id, request.reader_id, followed):
                return replace(grant, lease_id=request.ask_id, final=False, reason=None)
        if not grant.groups:
            self._leases.totals.refused += 1
        return grant

    def coming(self, request: LeaseKv) -> KvGrant:
        """A grant of nothing: the blocks of a request that ``lease`` does not know yet are not here, but will be."""
        return replace(self._empty_grant(request.ask_id, request.reader_id, None), final=False)

    def release(self, release: ReleaseKv) -> None:
        """End leases of a reader. Unknown leases, and leases of other readers, are ignored.

        A release that overtakes its lease request is ignored too; that lease expires. An offer that this worker itself
        releases before it is made is never made: the leg broke off, but its request may still end in the engine.
        """
        me = self._settings.worker_id
        if (release.worker_id, release.epoch) != (me, self._settings.epoch):
            return
        for lease_id in (*release.ask_ids, *release.lease_ids):
            self._free(self._leases.release(lease_id, release.reader_id))
        if release.reader_id == me:
            self._unwanted_offers.update(dict.fromkeys(release.lease_ids))

    def offer(
        self,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        block_ids: Sequence[Sequence[int]],
        offer_id: str = "",
        first_token: FirstToken | None = None,
    ) -> KvOffer | None:
        """Pin what a reader needs of a computed prompt, as much as the limits allow; None if they allow nothing or the
        offer was released already. ``block_ids`` are the request's, by group; it still has them.

        vLLM frees the request's blocks when it finishes; without this pin they could be evicted before the decode
        worker has read them.
        """
        groups = self.groups
        end = min(groups.last_boundary(prompt_tokens), LEASE_BLOCKS_MAX * groups.unit - groups.beyond)
        hashes = hashes[: (end + groups.beyond) // groups.unit] if end > 0 else ()
        if not hashes or not any(block_ids) or offer_id in self._unwanted_offers:
            return None
        lends = not self._draining and not self._leases.is_full()
        parts, boundary = self._offered(hashes, end, block_ids) if lends else ([], 0)
        if not boundary:
            self._leases.totals.refused += 1
            return None
        settings = self._settings
        lease_id = offer_id or new_lease_id()
        until_s = self._now() + min(settings.lease_s, settings.lease_s_max)
        return KvOffer(
            worker_id=settings.worker_id,
            epoch=settings.epoch,
            lease_id=lease_id,
            groups=self._pin(lease_id, ANYONE, parts, until_s, boundary),
            boundary=boundary,
            last_hash=bytes(hashes[boundary // self.groups.unit - 1]),
            until_s=until_s,
            first_token=first_token,
        )

    def held(self, hashes: list[bytes]) -> int:
        """How many of a prompt's hashes precede the longest boundary in the cache."""
        unit = self.groups.unit
        if self._boundaries is not None:
            return self._boundaries.find(hashes, len(hashes) * unit)[1] // unit
        # A cache evicts the end of a prompt before its beginning, so a binary search will do.
        find = self._pool.get_cached_block
        return bisect_left(hashes, True, key=lambda name: find(name, self._full) is None)

    def leased(self, lease_id: str) -> tuple[list[list[int]], int]:
        """Blocks of a lease by group, in the order of the prompt, and its boundary; nothing and 0 if it is unknown or a
        grant of it has ended.
        """
        lease = self._leases.find(lease_id)
        if lease is None or not lease.groups:
            return [], 0
        return [list(chain(*of_grants)) for of_grants in zip(*lease.groups, strict=True)], lease.boundary

    def release_own(self, offer_id: str) -> None:
        """End an offer that nobody will read."""
        settings = self._settings
        self.release(
            ReleaseKv(
                worker_id=settings.worker_id, epoch=settings.epoch, reader_id=settings.worker_id, lease_ids=[offer_id]
            )
        )

    def watch(self, pool: Any) -> None:
        """Follow what vLLM's block pool names while it schedules. Call after ``bind``."""
        self._pending_writes.watch(pool, names_again=not self.groups.keeps_prefix)

    def begin_step(self) -> None:
        """The engine begins to schedule a step."""
        self._pending_writes.begin_step()

    def scheduled(self, step: object) -> None:
        """A step was scheduled: vLLM has put its blocks into the prefix cache, but their KV is not computed yet."""
        self._pending_writes.scheduled(step)

    def computed(self, step: object) -> None:
        """The output of the step has arrived. Call before the scheduler processes it."""
        self._pending_writes.computed(step)

    def advance(self) -> list[KvGrant]:
        """Call after each step and each call of the worker: end expired leases and grant newly computed blocks of
        followed prompts.
        """
        if not self._leases:
            return []
        now = self._now()
        self._free(self._leases.expire(now))
        if not self._leases.followed:
            return []
        grants = (self._grant_further(lease, now) for lease in list(self._leases.followed.values()))
        return [grant for grant in grants if grant is not None]

    def note_prompt(self, hashes: Sequence[bytes], prompt_tokens: int, cached_tokens: int, leg_id: LegId) -> None:
        """Record how many tokens of a leg's prompt were cached when it was scheduled; its last grant to a reader says
        so.
        """
        if lent := self.groups.last_boundary(prompt_tokens):
            name = bytes(hashes[lent // self.groups.unit - 1])
            self._prompts.pop(name, None)
            self._prompts[name] = leg_id, cached_tokens

    def note_first_token(self, leg_id: LegId, token: FirstToken) -> None:
        """A prefill leg has sampled its token; its last grant to a reader has it."""
        self._first_tokens[leg_id] = token

    def leg_ended(self, leg_id: LegId) -> None:
        """A prefill leg has ended in any way. Blocks that it has not computed by now, for example because its prompt
        has other hashes than the reader's, will not come: the next ``advance`` sends its followers a last grant.
        """
        self._ended_legs[leg_id] = None

    def release_all(self) -> None:
        """Before the engine ends: unpin all blocks and refuse new leases. ``advance`` sends followers a last grant.

        Readers still rely on their grants, so the engine must compute nothing after this call. Do not use it to reset
        the prefix cache: vLLM resets the pool first, which fails while blocks are pinned. The connector's
        ``reset_cache`` returns False while a lease exists, and the caller retries after ``next_expiry_s``.
        """
        self._draining = True
        self._free(self._leases.unpin_all())

    @property
    def lease_state(self) -> tuple[int, int, float]:
        """Leases, pinned blocks and ``next_expiry_s`` of ``counts``."""
        leases = self._leases
        if not leases:
            return NO_LEASES
        next_expiry_s = leases.next_expiry()
        return len(leases), leases.pinned_blocks, 0.0 if next_expiry_s == math.inf else next_expiry_s

    @property
    def counts(self) -> LeaseCounts:
        totals = self._leases.totals
        leases, pinned_blocks, next_expiry_s = self.lease_state
        return LeaseCounts(
            leases=leases,
            pinned_blocks=pinned_blocks,
            next_expiry_s=next_expiry_s,
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

    def _hashes_of(self, request: LeaseKv) -> list[bytes] | None:
        """None if the message is malformed."""
        if not 0 < len(request.hashes) <= LEASE_BLOCKS_MAX * FULL_HASH_BYTES or len(request.hashes) % FULL_HASH_BYTES:
            return None
        if not (0 <= request.first <= CHAIN_BLOCKS_MAX and 0 <= request.have <= PROMPT_TOKENS_MAX):
            return None
        begin = request.first * self.groups.unit
        if request.end and (request.end <= begin or request.end % self.groups.unit):
            return None
        if any(begin % group.block_size for group in self.groups.groups):
            return None
        return unpack_full_hashes(request.hashes)

    def _next_grant(self, lease_id: str, reader_id: WorkerId, prompt: FollowedPrompt, tries: int) -> KvGrant | None:
        """Pin what is ready of the rest; None if nothing is. A grant that leaves some has a reason.

        ``tries``: 0 while the prompt is computed; then the number of boundaries to try, the longest first.
        """
        boundaries = self._boundaries
        if boundaries is not None:
            is_ahead = not self._full or prompt.full_tokens > prompt.end - self._full_block_size
            if tries or (is_ahead and not prompt.leg_id):  # With the end of a leg comes its first token, too.
                grant = self._grant_boundary(boundaries, lease_id, reader_id, prompt, tries)
                if tries or (grant is not None and grant.groups):
                    return grant
        ready = self._ready(prompt)
        return self._grant_full(lease_id, reader_id, prompt, ready) if ready else None

    def _grant_full(self, lease_id: str, reader_id: WorkerId, prompt: FollowedPrompt, ready: Sequence[Any]) -> KvGrant:
        """Pin as many of these full-attention blocks as the limits allow."""
        groups, size, is_dense = self._full, self._full_block_size, self._boundaries is None
        count = self._leases.pinnable([block.block_id for block in ready]) // len(groups)
        first = prompt.full_tokens // size
        prompt.full_tokens += count * size
        reason = None
        if not is_dense or prompt.full_tokens < prompt.end:
            reason = NoGrant.FULL if count * len(groups) < len(ready) else NoGrant.NOT_HELD
        if not count:
            return self._empty_grant(lease_id, reader_id, reason)
        parts = [Part(0, ())] * len(self.groups.groups)
        for place, group in enumerate(groups):
            parts[group] = Part(first, ready[place : count * len(groups) : len(groups)])
        return self._grant(lease_id, reader_id, prompt, parts, prompt.full_tokens if is_dense else 0, reason)

    def _ready(self, prompt: FollowedPrompt) -> list[Any]:
        """The next blocks of the full-attention groups that are cached and computed, up to the first gap; those of all
        groups beside each other.
        """
        find, is_pending, groups = self._pool.get_cached_block, self._pending_writes.writes, self._full
        ready: list[Any] = []
        if not groups:
            return ready
        stride = self._full_hashes
        end = (prompt.full_tokens // self._full_block_size + 1) * stride - prompt.first
        for block_hash in islice(prompt.hashes, end - 1, prompt.end // self.groups.unit - prompt.first, stride):
            cached = find(block_hash, groups)
            if cached is None or is_pending(cached[0].block_id):
                break
            if len(cached) > 1 and any(is_pending(block.block_id) for block in cached):
                break
            ready += cached
        return ready

    def _grant_boundary(
        self, boundaries: Boundaries, lease_id: str, reader_id: WorkerId, prompt: FollowedPrompt, tries: int
    ) -> KvGrant | None:
        """Pin what the reader lacks at the longest boundary; without ``tries`` only at the last one of the prompt.
        None: there is none. A grant of nothing: it is blocked.
        """
        end = self.groups.cut(prompt.end)
        parts, boundary, reason = boundaries.longest(prompt, least=1 if tries else end, tries=tries)
        if not boundary:
            return self._empty_grant(lease_id, reader_id, reason) if prompt.is_blocked else None
        return self._grant(lease_id, reader_id, prompt, parts, boundary, None if boundary == end else NoGrant.NOT_HELD)

    def _offered(
        self, hashes: Sequence[bytes], end: int, block_ids: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Part], int]:
        """What to offer of an ended request's blocks up to ``end``, and its boundary; 0: nothing."""
        if self._boundaries is None:
            held = block_ids[GROUP][: len(hashes)]
            held = held[: self._leases.pinnable(held)]
            return [Part(0, [self._pool.blocks[block_id] for block_id in held])], len(held) * self.groups.unit
        prompt = FollowedPrompt(list(hashes), hold_s=0.0, until_s=0.0, full_tokens=0, end=end)
        own = set(chain(*block_ids))
        parts, boundary, _reason = self._boundaries.longest(prompt, least=1, tries=TRIED_MAX, own=own)
        return parts, boundary

    def _grant(
        self,
        lease_id: str,
        reader_id: WorkerId,
        prompt: FollowedPrompt,
        parts: Sequence[Part],
        boundary: int,
        reason: NoGrant | None,
    ) -> KvGrant:
        """Pin these blocks."""
        empty = self._empty_grant(lease_id, reader_id, reason)
        until_s = empty.clock_s + prompt.hold_s
        return replace(
            empty,
            lease_id=lease_id,
            groups=self._pin(lease_id, reader_id, parts, until_s, boundary),
            boundary=boundary,
            last_hash=prompt.hashes[(boundary or prompt.full_tokens) // self.groups.unit - prompt.first - 1],
            until_s=until_s,
        )

    def _empty_grant(self, ask_id: str, reader_id: WorkerId, reason: NoGrant | None) -> KvGrant:
        return KvGrant(
            reader_id=reader_id,
            worker_id=self._settings.worker_id,
            epoch=self._settings.epoch,
            ask_id=ask_id,
            clock_s=self._now(),
            reason=reason,
        )

    def _grant_further(self, lease: Lease, now: float) -> KvGrant | None:
        followed = lease.followed
        assert followed is not None
        if self._draining or now >= followed.until_s:
            return self._stop_following(lease, followed, NoGrant.DRAINING if self._draining else NoGrant.FOLLOW_OVER)
        leg_ended, tries = followed.leg_id in self._ended_legs, 0
        if leg_ended:
            tries = TRIED_MAX if now >= followed.stuck_since_s + FULL_S_MAX else 1
        grant = self._next_grant(lease.lease_id, lease.reader_id, followed, tries)
        if grant is None:
            return self._stop_following(lease, followed, NoGrant.FOLLOW_OVER) if leg_ended else None
        followed.progress(now, granted=bool(grant.groups))
        is_last = grant.reason is None or (leg_ended and grant.reason is NoGrant.NOT_HELD and bool(grant.groups))
        if is_last or now >= followed.stuck_since_s + FULL_S_MAX:
            self._leases.stop_following(lease.lease_id)
            return self._last(replace(grant, lease_id=lease.lease_id), followed)
        return replace(grant, final=False, reason=None) if grant.groups else None

    def _stop_following(self, lease: Lease, followed: FollowedPrompt, reason: NoGrant) -> KvGrant:
        """A last grant without blocks."""
        self._leases.stop_following(lease.lease_id)
        last = self._empty_grant(lease.lease_id, lease.reader_id, reason)
        return self._last(replace(last, lease_id=lease.lease_id), followed)

    def _last(self, grant: KvGrant, followed: FollowedPrompt) -> KvGrant:
        """The grant with what only the last one says of a followed prompt."""
        token = self._first_tokens.get(followed.leg_id)
        return replace(grant, prefill_cached_tokens=self._cached_tokens_of(followed), first_token=token)

    def _pin(
        self, lease_id: str, reader_id: WorkerId, parts: Sequence[Part], until_s: float, boundary: int
    ) -> list[GroupBlocks]:
        groups = [[block.block_id for block in part.blocks] for part in parts]
        blocks, block_ids = parts[0].blocks, groups[0]
        if len(parts) > 1:
            blocks = [block for group in self.groups.order for block in parts[group].blocks]
            block_ids = [block.block_id for block in blocks]
        self._pool.touch(blocks)
        self._leases.grant(lease_id, reader_id, block_ids, until_s, groups, boundary)
        return [
            GroupBlocks(first=part.first, block_ids=pack_block_ids(ids))
            for part, ids in zip(parts, groups, strict=True)
        ]

    def _free(self, block_ids: list[int]) -> None:
        """Last blocks first, as vLLM does: the pool evicts in the order of freeing, so states, windows and the end of a
        prompt go before its beginning, which other prompts may share.
        """
        if block_ids:
            self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
            self._on_freed(block_ids)

    def _cached_tokens_of(self, followed: FollowedPrompt) -> int:
        last = followed.hashes[followed.end // self.groups.unit - followed.first - 1]
        leg_id, cached = self._prompts.get(last, (NO_LEG, 0))
        return cached if followed.leg_id in (leg_id, NO_LEG) else -1


def _end_of(request: LeaseKv, hashes_end: int) -> int:
    """The end of what may be granted, where the hashes end there."""
    return min(request.end, hashes_end) if request.end else hashes_end
