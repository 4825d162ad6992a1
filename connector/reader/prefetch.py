"""Fetches without a request: prefetch, replicate, evacuate. No token is computed.

Blocks are allocated from the engine's pool, read, put into the prefix cache and freed. To the engine they look like the
prefix of a request that has just ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from connector.messages import FetchEnded, PeerKey, ReadPart, StartFetch
from connector.reader.fetch import Fetch
from connector.reader.lease_request import Source
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
WAITING_MAX = 64
"""Orders that wait for fetches of others."""
DEADLINE = "the deadline passed"
NO_MORE = "memory or sources had no more blocks"


class BlockAllocator(Protocol):
    """The engine's blocks, by id."""

    @property
    def fetch_blocks_max(self) -> int:
        """Blocks that all fetches together may pin."""

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Pin the longest cached prefix of these."""

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content; none if too few would remain for requests."""

    def cache(self, hashes: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """Put ``blocks`` into the prefix cache; they hold the content of ``hashes`` from ``first`` on."""

    def free(self, blocks: Sequence[int]) -> None:
        """Unpin held blocks, give back allocated ones."""


@dataclass(slots=True)
class Prefetch:
    order: StartFetch
    fetch: Fetch
    hashes: list[bytes]
    held: list[int]
    started_at: float
    ends_at: float
    blocks: list[int] = field(default_factory=list)
    failure: str = ""
    waiting: list[Waiting] = field(default_factory=list)
    """Later orders for blocks of this fetch."""

    @property
    def pinned(self) -> int:
        """Blocks that it keeps from requests."""
        return len(self.held) + len(self.blocks)

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

    def __init__(self, reader: Reader, now: Callable[[], float]) -> None:
        self.ended: list[FetchEnded] = []
        self._reader = reader
        self._now = now
        self._allocator: BlockAllocator
        self.under_way: list[Prefetch] = []
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
        held = self._allocator.hold(hashes)
        if len(held) == len(hashes) or (refusal := self._refusal(len(held))):
            self._allocator.free(held)
            failure = "" if len(held) == len(hashes) else refusal
            self._answer(order, FetchedKv(held=len(held), failure=failure))
            return
        sources = [
            Source(
                peer=(source.worker_id, source.epoch),
                first=source.first,
                end=min(source.end or len(hashes), len(hashes)),
            )
            for source in order.fetch.sources
        ]
        fetch = Fetch(self._reader.plan(hashes, len(held), sources, LegOrder(wait_s_max=seconds)), now)
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
        elif not fetch.begun and (count := fetch.count()) is not None:
            prefetch.blocks = self._allocator.allocate(min(count, self._room())) if count else []
            if prefetch.blocks:
                fetch.begin(prefetch.blocks, now)
            else:
                prefetch.failure = "no memory is free" if count else "no source holds it"
                fetch.stop()

    def _finish(self, prefetch: Prefetch) -> None:
        held, hashes, arrived = prefetch.held, prefetch.hashes, min(prefetch.fetch.arrived, len(prefetch.blocks))
        self._allocator.cache(hashes, len(held), prefetch.blocks[:arrived])
        self._allocator.free([*held, *prefetch.blocks])
        reads = prefetch.fetch.reads()
        failure = prefetch.failure or next((read.failure for read in reads if read.failure), "")
        whole = len(held) + arrived == len(hashes)
        result = FetchedKv(
            held=len(held),
            fetched=arrived,
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

    def _refusal(self, held: int) -> str:
        """Why no further fetch with so many cached blocks may begin; empty: it may."""
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
        self._allocator.free(held)
        left_s = waiting.ends_at - self._now()
        tried = {(source.worker_id, source.epoch) for source in ended.order.fetch.sources}
        has_more = waiting.ends_at > ended.ends_at and ended.failure == DEADLINE
        has_more |= any((source.worker_id, source.epoch) not in tried for source in waiting.order.fetch.sources)
        if len(held) < len(waiting.hashes) and left_s > 0 and has_more:
            self._again.append(replace(waiting.order, fetch=replace(waiting.order.fetch, deadline_s=left_s)))
            return
        failure = "" if len(held) == len(waiting.hashes) else ended.failure or NO_MORE
        self._answer(waiting.order, FetchedKv(held=len(held), failure=failure))

    def _answer(self, order: StartFetch, result: FetchedKv) -> None:
        self.ended.append(FetchEnded(fetch_id=order.fetch_id, result=result))
