"""Adapters from the simulated cache to the connector's interfaces: for leases, and for fetched blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connector.reader.prefetch import FREE_SHARE_MIN, HELD_SHARE_MAX
from services.worker.engines.simulated.core.block_cache import BlockCache


@dataclass(frozen=True, slots=True)
class NumberedBlock:
    """A block of vLLM's pool, reduced to its number."""

    block_id: int


class LeasablePool:
    """A ``connector.holder.holder.Pool``. A block gets its name when the step that fills it has ended."""

    def __init__(self, cache: BlockCache) -> None:
        self.blocks: Sequence[NumberedBlock] = [NumberedBlock(number) for number in range(cache.blocks)]
        self.enable_caching = cache.prefix_caching
        self._cache = cache

    def get_cached_block(self, block_hash: bytes, _groups: list[int]) -> list[NumberedBlock] | None:
        """The block cached under this hash, in a list as in vLLM, or None."""
        block = self._cache.block_of(block_hash)
        return None if block is None else [self.blocks[block]]

    def touch(self, blocks: Sequence[NumberedBlock]) -> None:
        """Add one hold to each block."""
        self._cache.hold([block.block_id for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[NumberedBlock]) -> None:
        """Remove one hold from each block; the first block is evicted first."""
        ordered = [block.block_id for block in ordered_blocks]
        self._cache.release(ordered[::-1])


class CacheBlockAllocator:
    """See ``connector.reader.prefetch.BlockAllocator``."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache

    @property
    def fetch_blocks_max(self) -> int:
        """Blocks that all fetches together may pin."""
        return int(self._cache.blocks * HELD_SHARE_MAX)

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold the longest cached prefix of these."""
        found = self._cache.find(hashes, len(hashes))
        self._cache.hold(found)
        return found

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content. ``FREE_SHARE_MIN`` of all blocks stays free for requests."""
        spare = self._cache.free - int(self._cache.blocks * FREE_SHARE_MIN)
        return self._cache.take(max(0, min(count, spare))) or []

    def cache(self, hashes: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """Put them into the prefix cache."""
        for index, block in enumerate(blocks, start=first):
            self._cache.name(block, hashes[index], hashes[index - 1] if index else None)

    def free(self, blocks: Sequence[int]) -> None:
        """Release blocks from ``hold`` or ``allocate``."""
        self._cache.release(blocks)
