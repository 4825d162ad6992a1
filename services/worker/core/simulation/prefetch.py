"""Blocks fetched by command, for no sequence: afterwards they are cached, like those of one that has just ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from connector.core.asks import Source
from connector.core.calls import FetchEnded, StartFetch
from connector.core.fetch import Fetch
from connector.core.orders import PeerKey, ReadPart
from connector.reader import Reader
from services.worker.core.simulation.block_cache import BlockCache
from shared.contracts.kv_exchange import FetchedKv, KvGrant, LegOrder, unpack_full_hashes

FETCHES_MAX = 16
"""At a time; one more is refused."""
FREE_SHARE_MIN = 0.1
"""Of the cache, left to requests whatever is to be fetched."""


@dataclass(slots=True)
class Prefetch:
    """One command under way. It holds the blocks that were there, and those that are being read."""

    fetch_id: str
    hashes: list[bytes]
    held: list[int]
    fetch: Fetch
    began_at: float
    ends_at: float
    room: list[int] = field(default_factory=list)
    failure: str = ""


class Prefetcher:
    """All commands under way."""

    def __init__(self, reader: Reader, cache: BlockCache, block_tokens: int, now: Callable[[], float]) -> None:
        self.ended: list[FetchEnded] = []
        self._reader = reader
        self._cache = cache
        self._block_tokens = block_tokens
        self._now = now
        self._under_way: list[Prefetch] = []

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._under_way

    def start(self, order: StartFetch) -> None:
        """Begin; ends in ``ended``, at once when there is nothing to do."""
        hashes = unpack_full_hashes(order.fetch.hashes)
        held = self._cache.find(hashes, len(hashes))
        if len(held) == len(hashes):
            self._end(order.fetch_id, FetchedKv(held=len(held)))
            return
        if len(self._under_way) >= FETCHES_MAX:
            self._end(order.fetch_id, FetchedKv(held=len(held), failure="too many fetches at a time: try again later"))
            return
        self._cache.hold(held)
        now, seconds = self._now(), order.fetch.deadline_s
        sources = [
            Source(
                peer=(source.worker_id, source.epoch),
                first=source.first,
                end=min(source.end or len(hashes), len(hashes)),
            )
            for source in order.fetch.sources
        ]
        plan = self._reader.plan(hashes, len(held), sources, LegOrder(wait_s_max=seconds))
        fetch = Fetch(plan, now)
        self._under_way.append(Prefetch(order.fetch_id, hashes, held, fetch, now, now + seconds))

    def go_on(self) -> None:
        """Now and then, and after each event."""
        for prefetch in list(self._under_way):
            self._go_on(prefetch, self._now())
            if prefetch.fetch.over and (prefetch.fetch.begun or prefetch.fetch.stopped):
                self._under_way.remove(prefetch)
                self._finish(prefetch)

    def on_grant(self, grant: KvGrant) -> None:
        """To whom it belongs."""
        for prefetch in self._under_way:
            if prefetch.fetch.asked(grant.ask_id):
                prefetch.fetch.on_grant(grant, self._now())

    def on_part(self, part: ReadPart) -> None:
        """Blocks of a read are final."""
        for prefetch in self._under_way:
            if prefetch.fetch.reads_as(part.read_id):
                prefetch.fetch.on_part(part, self._now())

    def on_peer(self) -> None:
        """One more peer is known."""
        for prefetch in self._under_way:
            prefetch.fetch.on_peer(self._now())

    def on_peer_gone(self, key: PeerKey) -> None:
        """That life of a worker is over."""
        for prefetch in self._under_way:
            prefetch.fetch.on_peer_gone(key, self._now())

    def _go_on(self, prefetch: Prefetch, now: float) -> None:
        fetch = prefetch.fetch
        fetch.on_time(now)
        if fetch.stopped:
            return
        if now >= prefetch.ends_at:
            prefetch.failure = "the deadline passed"
            fetch.stop()
        elif not fetch.begun and (count := fetch.count()) is not None:
            prefetch.room = self._room(count)
            if prefetch.room:
                fetch.begin(prefetch.room, now)
            else:
                prefetch.failure = "no memory is free" if count else "nobody holds it"
                fetch.stop()

    def _room(self, count: int) -> list[int]:
        spare = self._cache.free - int(self._cache.blocks * FREE_SHARE_MIN)
        return self._cache.take(max(0, min(count, spare))) or []

    def _finish(self, prefetch: Prefetch) -> None:
        held, hashes, arrived = prefetch.held, prefetch.hashes, min(prefetch.fetch.arrived, len(prefetch.room))
        for index, block in enumerate(prefetch.room[:arrived], start=len(held)):
            self._cache.name(block, hashes[index], hashes[index - 1] if index else None)
        self._cache.release(held + prefetch.room)
        reads = prefetch.fetch.reads()
        failure = prefetch.failure or next((read.failure for read in reads if read.failure), "")
        whole = len(held) + arrived == len(hashes)
        fetched = FetchedKv(
            held=len(held),
            fetched=arrived,
            bytes=sum(read.bytes for read in reads),
            seconds=self._now() - prefetch.began_at,
            failure="" if whole else failure or "memory or sources had no more",
        )
        self._end(prefetch.fetch_id, fetched)

    def _end(self, fetch_id: str, result: FetchedKv) -> None:
        self.ended.append(FetchEnded(fetch_id=fetch_id, result=result))
