"""Fetches without a request: prefetch, replicate, evacuate. No token is computed.

Blocks are allocated from the engine's pool, read, put into the prefix cache and freed. To the engine they look like the
prefix of a request that has just ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from connector.messages import FetchEnded, PeerKey, ReadPart, StartFetch
from connector.reader.fetch import Fetch
from connector.reader.lease_request import Source
from connector.reader.reader import Reader
from shared.contracts.kv_exchange import FetchedKv, KvGrant, LegOrder, unpack_full_hashes

FETCHES_MAX = 16
"""At a time; further ones are refused."""
FREE_SHARE_MIN = 0.1
"""Share of the engine's blocks that stays free for requests."""


class BlockAllocator(Protocol):
    """The engine's blocks, by id."""

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
    """One fetch under way."""

    fetch_id: str
    fetch: Fetch
    hashes: list[bytes]
    held: list[int]
    started_at: float
    ends_at: float
    blocks: list[int] = field(default_factory=list)
    failure: str = ""


class Prefetcher:
    """All fetches without a request. Used on the scheduler's thread."""

    def __init__(self, reader: Reader, now: Callable[[], float]) -> None:
        self.ended: list[FetchEnded] = []
        self._reader = reader
        self._now = now
        self._allocator: BlockAllocator
        self._under_way: list[Prefetch] = []

    def bind(self, allocator: BlockAllocator) -> None:
        """Set the engine's blocks. Called once, before all other methods."""
        self._allocator = allocator

    @property
    def idle(self) -> bool:
        return not self._under_way

    @property
    def reads_under_way(self) -> int:
        """Number of reads that are not over."""
        return sum(prefetch.fetch.reads_under_way for prefetch in self._under_way)

    def start(self, order: StartFetch) -> None:
        """Begin a fetch. Its result is appended to ``ended``, at once if there is nothing to do."""
        hashes = unpack_full_hashes(order.fetch.hashes)
        held = self._allocator.hold(hashes)
        refusal = "too many fetches at a time: try again later" if len(self._under_way) >= FETCHES_MAX else ""
        if len(held) == len(hashes) or refusal:
            self._allocator.free(held)
            failure = "" if len(held) == len(hashes) else refusal
            self.ended.append(FetchEnded(fetch_id=order.fetch_id, result=FetchedKv(held=len(held), failure=failure)))
            return
        now, seconds = self._now(), order.fetch.deadline_s
        sources = [
            Source(
                peer=(source.worker_id, source.epoch),
                first=source.first,
                end=min(source.end or len(hashes), len(hashes)),
            )
            for source in order.fetch.sources
        ]
        fetch = Fetch(self._reader.plan(hashes, len(held), sources, LegOrder(wait_s_max=seconds)), now)
        self._under_way.append(Prefetch(order.fetch_id, fetch, hashes, held, now, now + seconds))
        self.advance()

    def advance(self) -> None:
        """Called in every step and after each event."""
        for prefetch in list(self._under_way):
            self._advance(prefetch, self._now())
            if prefetch.fetch.over and (prefetch.fetch.begun or prefetch.fetch.stopped):
                self._under_way.remove(prefetch)
                self._finish(prefetch)

    def on_grant(self, grant: KvGrant) -> None:
        for prefetch in self._under_way:
            if prefetch.fetch.has_request(grant.ask_id):
                prefetch.fetch.on_grant(grant, self._now())

    def on_part(self, part: ReadPart) -> None:
        """A part of a read has ended."""
        for prefetch in self._under_way:
            if prefetch.fetch.is_reading(part.read_id):
                prefetch.fetch.on_part(part, self._now())

    def on_peer(self) -> None:
        """A peer was connected."""
        for prefetch in self._under_way:
            prefetch.fetch.on_peer(self._now())

    def on_peer_gone(self, key: PeerKey) -> None:
        """The worker with this epoch is gone."""
        for prefetch in self._under_way:
            prefetch.fetch.on_peer_gone(key, self._now())

    def _advance(self, prefetch: Prefetch, now: float) -> None:
        fetch = prefetch.fetch
        fetch.on_time(now)
        if fetch.stopped:
            return
        if now >= prefetch.ends_at:
            prefetch.failure = "the deadline passed"
            fetch.stop()
        elif not fetch.begun and (count := fetch.count()) is not None:
            prefetch.blocks = self._allocator.allocate(count) if count else []
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
            failure="" if whole else failure or "memory or sources had no more blocks",
        )
        self.ended.append(FetchEnded(fetch_id=prefetch.fetch_id, result=result))
