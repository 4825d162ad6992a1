"""Fetches without a request: prefetch, replicate, evacuate. No token is computed.

Requests wait for a fetch under way that brings what they lack: nothing is read twice.

Blocks are allocated from the engine's pool, read, put into the prefix cache and freed. To the engine they look like the
prefix of a request that has just ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from connector.groups import Blocks
from connector.messages import FetchEnded, PeerKey, ReadPart, StartFetch
from connector.reader.fetch import Fetch
from connector.reader.prefetched_blocks import PrefetchedBlocks
from connector.reader.reader import Reader
from shared.contracts.kv_exchange import FetchedKv, KvGrant, LegOrder, unpack_full_hashes

FETCHES_MAX = 16
"""Fetches at a time; further ones are refused."""
FREE_SHARE_MIN = 0.1
"""Share of the engine's blocks that stays free for requests."""
HELD_SHARE_MAX = 0.5
"""Share of the engine's blocks that all fetches together may pin: cached prefixes and blocks that they read into. The
rest stays for requests, however many fetches are ordered.
"""
PREFETCHED_SHARE_MAX = 0.25
"""Share of the engine's blocks that prefetches may fill with what no request has found yet: they evict what was in use.
"""
WAITING_MAX = 64
"""Orders that wait for fetches of others."""
DEADLINE = "the deadline passed"
BY_A_REQUEST = "a request reads it already"
NO_MORE = "memory or sources had no more blocks"


@dataclass(frozen=True, slots=True)
class Held:
    """What is cached of a prompt, pinned. Counts are of its hashes."""

    full: int
    """Full attention is cached up to here."""
    boundary: int
    """A request can continue here."""
    blocks: list[int]


class BlockAllocator(Protocol):
    """The engine's blocks, by id."""

    @property
    def fetch_blocks_max(self) -> int:
        """Blocks that all fetches together may pin."""

    @property
    def blocks(self) -> int:
        """Blocks of the engine."""

    def hold(self, hashes: Sequence[bytes]) -> Held:
        """Pin what is cached of a prompt with these hashes."""

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content; none if too few would remain for requests."""

    def cache(self, hashes: Sequence[bytes], blocks: Blocks, boundary: int) -> None:
        """Put these blocks of a prompt into the prefix cache; the last one may be filled up to the boundary only."""

    def free(self, blocks: Sequence[int]) -> None:
        """Unpin held blocks, give back allocated ones."""

    def evicted_next(self, count: int) -> set[bytes]:
        """Names of what is cached in the ``count`` blocks that new content will take next, without their groups."""

    def evict_first(self, blocks: Sequence[int], names: set[bytes]) -> None:
        """Have new content take those of these blocks next that nobody holds and that have one of these names."""


@dataclass(slots=True)
class Prefetch:
    order: StartFetch
    fetch: Fetch
    hashes: list[bytes]
    held: Held
    started_at: float
    ends_at: float
    blocks: list[Blocks] = field(default_factory=list)
    """Allocated, by group."""
    failure: str = ""
    waiting: list[Waiting] = field(default_factory=list)
    """Later orders for blocks of this fetch."""

    @property
    def pinned(self) -> int:
        """Blocks that it keeps from requests."""
        return len(self.held.blocks) + sum(len(blocks.ids) for blocks in self.blocks)

    def brings(self, hashes: Sequence[bytes], start: int) -> bool:
        """Whether it may bring what a prompt with these hashes lacks from the position ``start`` on."""
        common, plan = min(len(self.hashes), len(hashes)), self.fetch.plan
        is_same = common > 0 and self.hashes[common - 1] == hashes[common - 1]
        return is_same and not self.fetch.stopped and plan.start <= start < plan.goal

    def includes(self, hashes: list[bytes]) -> bool:
        """Whether it fetches all of these: a block's hash names all blocks before it, too."""
        return len(hashes) <= len(self.hashes) and self.hashes[len(hashes) - 1] == hashes[-1]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An order whose blocks another fetch under way reads."""

    order: StartFetch
    hashes: list[bytes]
    ends_at: float


class Prefetcher:
    """All fetches without a request. Used on the scheduler's thread."""

    def __init__(
        self, reader: Reader, now: Callable[[], float], under_way: list[Prefetch], blocks: PrefetchedBlocks
    ) -> None:
        """``under_way``: empty, and known to the reader, whose requests wait for these fetches."""
        self.ended: list[FetchEnded] = []
        self._reader = reader
        self._now = now
        self._allocator: BlockAllocator
        self.under_way = under_way
        self._prefetched = blocks
        self._again: list[StartFetch] = []
        """Orders to start anew: the fetch that they waited for has failed."""

    def bind(self, allocator: BlockAllocator) -> None:
        """Set the engine's blocks. Called once, before all other methods."""
        self._allocator = allocator

    @property
    def idle(self) -> bool:
        return not self.under_way

    @property
    def reads_under_way(self) -> int:
        return sum(prefetch.fetch.reads_under_way for prefetch in self.under_way)

    def start(self, order: StartFetch) -> None:
        """Begin a fetch. Its result is appended to ``ended``, at once if there is nothing to do."""
        hashes = unpack_full_hashes(order.fetch.hashes)
        now, seconds = self._now(), order.fetch.deadline_s
        if hashes and order.fetch.sources and self._joins(Waiting(order, hashes, now + seconds)):
            return
        held, groups, goal = self._allocator.hold(hashes), self._reader.groups, self._goal(hashes)
        if held.boundary * groups.unit >= goal or (refusal := self._refusal(order, hashes, len(held.blocks))):
            self._allocator.free(held.blocks)
            failure = "" if held.boundary * groups.unit >= goal else refusal
            self._answer(order, FetchedKv(held=held.boundary, failure=failure))
            return
        start = min(held.full * groups.unit, goal - 1) // groups.stride * groups.stride
        sources = self._reader.sources(order.fetch.sources, len(hashes) * groups.unit)
        common = held.boundary * groups.unit
        fetch = Fetch(self._reader.plan(hashes, start, common, goal, sources, LegOrder(wait_s_max=seconds)), now)
        self.under_way.append(Prefetch(order, fetch, hashes, held, now, now + seconds))
        self.advance()

    def advance(self) -> None:
        """Called in every step and after each event."""
        for prefetch in list(self.under_way):
            self._advance(prefetch, self._now())
            if prefetch.fetch.over and (prefetch.fetch.begun or prefetch.fetch.stopped):
                self.under_way.remove(prefetch)
                self._finish(prefetch)
        again, self._again = self._again, []
        for order in again:
            self.start(order)

    @property
    def listens(self) -> bool:
        """Whether grants may come as notices."""
        return any(prefetch.fetch.listens for prefetch in self.under_way)

    def on_grant(self, grant: KvGrant) -> None:
        for prefetch in self.under_way:
            if prefetch.fetch.has_request(grant.ask_id):
                prefetch.fetch.on_grant(grant, self._now())

    def on_part(self, part: ReadPart) -> None:
        for prefetch in self.under_way:
            if prefetch.fetch.is_reading(part.read_id):
                prefetch.fetch.on_part(part, self._now())

    def on_peer(self) -> None:
        """A peer was connected."""
        for prefetch in self.under_way:
            prefetch.fetch.on_peer(self._now())

    def on_peer_gone(self, key: PeerKey) -> None:
        """The worker with this epoch is gone."""
        for prefetch in self.under_way:
            prefetch.fetch.on_peer_gone(key, self._now())

    def _advance(self, prefetch: Prefetch, now: float) -> None:
        fetch = prefetch.fetch
        fetch.on_time(now)
        if prefetch.waiting:
            self._end_overdue(prefetch, now)
        if fetch.stopped:
            return
        if now >= prefetch.ends_at:
            prefetch.failure = DEADLINE
            fetch.stop()
        elif not fetch.begun and (tokens := fetch.tokens()) is not None:
            prefetch.blocks = self._allocate(prefetch.order, fetch, tokens)
            if prefetch.blocks:
                fetch.begin(prefetch.blocks, now)
            else:
                prefetch.failure = "no memory is free" if tokens else "no source holds it"
                fetch.stop()

    def _allocate(self, order: StartFetch, fetch: Fetch, tokens: int) -> list[Blocks]:
        """Blocks of each group for so many tokens, or fewer if each prefix is of use; none if there is no room."""
        groups, start = self._reader.groups, fetch.plan.start
        needed = (
            [groups.needed(number, start, start + tokens) for number in range(len(groups.groups))] if tokens else []
        )
        count = sum(map(len, needed))
        room = self._room_for_prefetches() if order.is_prefetch else self._room()
        ids = self._allocator.allocate(min(count, room)) if count else []
        if len(ids) < count and not groups.keeps_prefix:
            self._allocator.free(ids)
            return []
        left = iter(ids)
        allocated = [Blocks(number, run.start, list(islice(left, len(run)))) for number, run in enumerate(needed)]
        return allocated if ids else []

    def _finish(self, prefetch: Prefetch) -> None:
        held, hashes, fetch, groups = prefetch.held, prefetch.hashes, prefetch.fetch, self._reader.groups
        arrived = fetch.arrived if fetch.begun else 0
        end = fetch.plan.start + arrived if arrived else held.boundary * groups.unit
        for blocks in prefetch.blocks:
            # Without the boundary, full attention that arrived spares a later fetch.
            if blocks.group in groups.full or arrived:
                upto = end if arrived else fetch.full_end
                last = groups.needed(blocks.group, 0, upto).stop
                self._allocator.cache(hashes, blocks.within(blocks.first, last), upto)
        self._allocator.free([*held.blocks, *(block_id for blocks in prefetch.blocks for block_id in blocks.ids)])
        if prefetch.order.is_prefetch:
            self._prefetched.add(hashes, held.boundary, end // groups.unit, self._now())
        reads = fetch.reads()
        failure = prefetch.failure or next((read.failure for read in reads if read.failure), "")
        whole = end >= self._goal(hashes)
        result = FetchedKv(
            held=held.boundary,
            fetched=end // groups.unit - held.boundary,
            bytes=sum(read.bytes for read in reads),
            seconds=self._now() - prefetch.started_at,
            failure="" if whole else failure or NO_MORE,
        )
        self._answer(prefetch.order, result)
        for waiting in prefetch.waiting:
            self._end_waiting(waiting, prefetch)

    def _end_overdue(self, prefetch: Prefetch, now: float) -> None:
        for waiting in prefetch.waiting:
            if now >= waiting.ends_at:
                self._answer(waiting.order, FetchedKv(failure=DEADLINE))
        prefetch.waiting = [waiting for waiting in prefetch.waiting if now < waiting.ends_at]

    def _room(self) -> int:
        """Further blocks that fetches may pin."""
        pinned = sum(prefetch.pinned for prefetch in self.under_way)
        return max(0, self._allocator.fetch_blocks_max - pinned)

    def _room_for_prefetches(self) -> int:
        """As ``_room``, for blocks that no request has found yet."""
        coming = sum(len(blocks.ids) for one in self.under_way if one.order.is_prefetch for blocks in one.blocks)
        most = int(self._allocator.blocks * PREFETCHED_SHARE_MAX)
        return max(0, min(self._room(), most - self._prefetched.unused - coming))

    def _refusal(self, order: StartFetch, hashes: Sequence[bytes], held: int) -> str:
        """Why no further fetch with so many cached blocks may begin; empty: it may."""
        if order.is_prefetch and self._reader.is_fetching(hashes):
            return BY_A_REQUEST
        if len(self.under_way) >= FETCHES_MAX:
            return "too many fetches at a time: try again later"
        return "fetches pin too many blocks: try again later" if held > self._room() else ""

    def _joins(self, waiting: Waiting) -> bool:
        """Whether the order waits for a fetch under way, which fetches its blocks anyway."""
        if sum(len(prefetch.waiting) for prefetch in self.under_way) >= WAITING_MAX:
            return False
        for prefetch in self.under_way:
            if not prefetch.fetch.stopped and prefetch.includes(waiting.hashes):
                prefetch.waiting.append(waiting)
                return True
        return False

    def _end_waiting(self, waiting: Waiting, ended: Prefetch) -> None:
        """The fetch that an order waited for has ended. Report what is cached now, or fetch the rest if the order has
        more time or other sources than that fetch had.
        """
        held = self._allocator.hold(waiting.hashes)
        self._allocator.free(held.blocks)
        is_whole = held.boundary * self._reader.groups.unit >= self._goal(waiting.hashes)
        left_s = waiting.ends_at - self._now()
        tried = {(source.worker_id, source.epoch) for source in ended.order.fetch.sources}
        has_more = waiting.ends_at > ended.ends_at and ended.failure == DEADLINE
        has_more |= any((source.worker_id, source.epoch) not in tried for source in waiting.order.fetch.sources)
        if not is_whole and left_s > 0 and has_more:
            self._again.append(replace(waiting.order, fetch=replace(waiting.order.fetch, deadline_s=left_s)))
            return
        failure = "" if is_whole else ended.failure or NO_MORE
        self._answer(waiting.order, FetchedKv(held=held.boundary, failure=failure))

    def _goal(self, hashes: list[bytes]) -> int:
        """The last position that a prompt with these hashes has KV of use for."""
        groups = self._reader.groups
        return groups.cut(max(0, len(hashes) * groups.unit - groups.beyond))

    def _answer(self, order: StartFetch, result: FetchedKv) -> None:
        self.ended.append(FetchEnded(fetch_id=order.fetch_id, result=result))
