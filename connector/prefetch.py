"""Blocks fetched by command, for no request: prefetch, replicate, evacuate. No token is computed.

They are taken from the block pool, read into, named by their hashes and given back: to the engine they look like the
prefix of a request that has just ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connector.core.asks import Source
from connector.core.calls import FetchEnded, StartFetch
from connector.core.fetch import Fetch
from connector.core.orders import PeerKey, ReadPart
from connector.reader import Reader
from shared.contracts.kv_exchange import FetchedKv, KvGrant, LegOrder, unpack_full_hashes

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

FETCHES_MAX = 16
"""At a time; one more is refused."""
FREE_SHARE_MIN = 0.1
"""Of the pool, left to requests whatever is to be fetched."""


@dataclass(slots=True)
class Prefetch:
    """One command under way."""

    fetch_id: str
    fetch: Fetch
    hashes: list[bytes]
    held: int
    started_at: float
    ends_at: float
    blocks: list[Any] = field(default_factory=list)
    failure: str = ""


class Prefetcher:
    """All commands under way, on the scheduler's thread."""

    def __init__(self, reader: Reader, block_tokens: int, now: Callable[[], float]) -> None:
        self.ended: list[FetchEnded] = []
        self._reader = reader
        self._block_tokens = block_tokens
        self._now = now
        self._pool: BlockPool | None = None
        self._under_way: list[Prefetch] = []

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._pool = pool

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._under_way

    def start(self, order: StartFetch) -> None:
        """Begin; ends in ``ended``, at once when there is nothing to do."""
        hashes = unpack_full_hashes(order.fetch.hashes)
        held = self._held(hashes)
        if len(self._under_way) >= FETCHES_MAX:
            self._end(order.fetch_id, FetchedKv(held=held, failure="too many fetches at a time: try again later"))
        elif held == len(hashes):
            self._end(order.fetch_id, FetchedKv(held=held))
        else:
            now, seconds = self._now(), order.fetch.deadline_s
            sources = [
                Source(
                    peer=(source.worker_id, source.epoch),
                    first=source.first,
                    end=min(source.end or len(hashes), len(hashes)),
                )
                for source in order.fetch.sources
            ]
            fetch = Fetch(self._reader.plan(hashes, held, sources, LegOrder(wait_s_max=seconds)), now)
            self._under_way.append(Prefetch(order.fetch_id, fetch, hashes, held, now, now + seconds))
            self.go_on()

    def go_on(self) -> None:
        """Once a step, and after each event."""
        for prefetch in list(self._under_way):
            self._go_on(prefetch, self._now())
            if prefetch.fetch.over and (prefetch.blocks or prefetch.failure):
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
            prefetch.blocks = self._room(count)
            if prefetch.blocks:
                fetch.begin([block.block_id for block in prefetch.blocks], now)
            else:
                prefetch.failure = "no memory is free" if count else "nobody holds it"
                fetch.stop()

    def _room(self, count: int) -> list[Any]:
        pool = self._pool
        if not count or pool is None:
            return []
        spare = pool.get_num_free_blocks() - int(pool.num_gpu_blocks * FREE_SHARE_MIN)
        count = min(count, spare)
        return pool.get_new_blocks(count) if count > 0 else []

    def _finish(self, prefetch: Prefetch) -> None:
        arrived = prefetch.fetch.arrived if prefetch.blocks else 0
        self._name(prefetch, arrived)
        if self._pool is not None and prefetch.blocks:
            self._pool.free_blocks(reversed(prefetch.blocks))
        reads = prefetch.fetch.reads()
        failure = prefetch.failure or next((read.failure for read in reads if read.failure), "")
        whole = prefetch.held + arrived == len(prefetch.hashes)
        self._end(
            prefetch.fetch_id,
            FetchedKv(
                held=prefetch.held,
                fetched=arrived,
                bytes=sum(read.bytes for read in reads),
                seconds=self._now() - prefetch.started_at,
                failure="" if whole else failure or "memory or sources had no more",
            ),
        )

    def _name(self, prefetch: Prefetch, count: int) -> None:
        """What arrived is part of the prefix cache from now on, and routers are told."""
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id, maybe_convert_block_hash

        pool, first = self._pool, prefetch.held
        if pool is None or not count or not pool.enable_caching:
            return
        named = [BlockHash(name) for name in prefetch.hashes[first : first + count]]
        for at, (name, block) in enumerate(zip(named, prefetch.blocks, strict=False), start=first + 1):
            pool._insert_block_hash(make_block_hash_with_group_id(name, 0), block, num_tokens=at * self._block_tokens)
        if pool.enable_kv_cache_events:
            parent = maybe_convert_block_hash(BlockHash(prefetch.hashes[first - 1])) if first else None
            pool.kv_event_queue.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(name) for name in named],
                    parent_block_hash=parent,
                    token_ids=[],
                    block_size=self._block_tokens,
                    lora_id=None,
                    medium=pool.medium,
                    lora_name=None,
                    group_idx=0,
                )
            )

    def _held(self, hashes: list[bytes]) -> int:
        from vllm.v1.core.kv_cache_utils import BlockHash

        pool = self._pool
        if pool is None:
            return 0
        absent = (at for at, name in enumerate(hashes) if pool.get_cached_block(BlockHash(name), [0]) is None)
        return next(absent, len(hashes))

    def _end(self, fetch_id: str, result: FetchedKv) -> None:
        self.ended.append(FetchEnded(fetch_id=fetch_id, result=result))
