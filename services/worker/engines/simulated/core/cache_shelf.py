"""The simulated cache as a shelf for blocks that no request asked for."""

from __future__ import annotations

from collections.abc import Sequence

from connector.reader.prefetch import FREE_SHARE_MIN
from services.worker.engines.simulated.core.block_cache import BlockCache


class CacheShelf:
    """See ``connector.reader.prefetch.Shelf``."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Keep the longest cached prefix of these where it is."""
        found = self._cache.find(hashes, len(hashes))
        self._cache.hold(found)
        return found

    def take(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content, none if too few would be left for requests."""
        spare = self._cache.free - int(self._cache.blocks * FREE_SHARE_MIN)
        return self._cache.take(max(0, min(count, spare))) or []

    def name(self, hashes: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """Into the prefix cache."""
        for index, block in enumerate(blocks, start=first):
            self._cache.name(block, hashes[index], hashes[index - 1] if index else None)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Held or taken, they are not needed any more."""
        self._cache.release(blocks)
