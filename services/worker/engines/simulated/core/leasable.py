"""The simulated cache as the holder of leases sees it: the part of vLLM's block pool that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.engines.simulated.core.block_cache import BlockCache


@dataclass(frozen=True, slots=True)
class NumberedBlock:
    """A block, by its number alone."""

    block_id: int


class LeasablePool:
    """A ``connector.holder.holder.Pool``. Blocks have no name before the step that fills them has ended."""

    def __init__(self, cache: BlockCache) -> None:
        self.blocks: Sequence[NumberedBlock] = [NumberedBlock(number) for number in range(cache.blocks)]
        self.enable_caching = cache.prefix_caching
        self._cache = cache

    def get_cached_block(self, block_hash: bytes, _groups: list[int]) -> list[NumberedBlock] | None:
        """The block that is cached under this hash."""
        block = self._cache.block_of(block_hash)
        return None if block is None else [self.blocks[block]]

    def touch(self, blocks: Sequence[NumberedBlock]) -> None:
        """Somebody more needs these."""
        self._cache.hold([block.block_id for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[NumberedBlock]) -> None:
        """Somebody fewer needs these; the first of them is forgotten first."""
        ordered = [block.block_id for block in ordered_blocks]
        self._cache.release(ordered[::-1])
