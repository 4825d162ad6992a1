"""What a simulated engine offers to a store: prefixes that it is about to evict, and those that were used twice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from connector.holder.hot_chains import EVICTION_BLOCKS_MAX, EVICTION_SHARE, LOOK_BACK_BLOCKS_MAX, HotChains
from replay.engine import Engine, Job
from shared.contracts.kv_events import BLOCK_HASH_BYTES, block_hash64
from shared.contracts.kv_exchange import FULL_HASH_BYTES

REAL_BLOCK_TOKENS = 16
"""Tokens of vLLM's blocks. Bounds of the product that count blocks are scaled to blocks of more tokens."""
REST_OF_HASH = bytes(FULL_HASH_BYTES - BLOCK_HASH_BYTES)


def full_hash(name: int) -> bytes:
    """A block's name as a full hash, of which routers know the beginning."""
    return name.to_bytes(BLOCK_HASH_BYTES, "big") + REST_OF_HASH


class Offers:
    """An engine's table of used chains, and its blocks by name, as ``ExchangeCore`` brings them together."""

    def __init__(self, engine: Engine) -> None:
        self._pool, profile = engine.pool, engine.profile
        larger = profile.block_tokens / REAL_BLOCK_TOKENS
        self._soon = min(int(EVICTION_BLOCKS_MAX / larger), int(profile.kv_blocks * EVICTION_SHARE))
        self.hot = HotChains(self._held, look_back_blocks=max(1, int(LOOK_BACK_BLOCKS_MAX / larger)))

    def note(self, job: Job, now: float) -> None:
        """A job has ended."""
        self.hot.note([full_hash(job.name_of(index)) for index in range(job.filled)], now)

    def evicted_next(self) -> set[bytes]:
        """Names of what is cached in the blocks that new content takes next."""
        return {full_hash(name) for name in self._pool.evicted_next(self._soon)}

    def freed(self, names: Iterable[int]) -> None:
        """Others do not read these blocks any more. What a store has just copied is evicted next, as it was to be."""
        if self.hot.leaving:
            self._pool.evict_first(name for name in names if full_hash(name) in self.hot.leaving)

    def _held(self, hashes: list[bytes]) -> int:
        return bisect_left(hashes, True, key=lambda block: not self._pool.has(block_hash64(block)))
