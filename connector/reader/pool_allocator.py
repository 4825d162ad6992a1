"""vLLM's block pool as a ``BlockAllocator``: memory for blocks that belong to no request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id, maybe_convert_block_hash

from connector.reader.prefetch import FREE_SHARE_MIN, HELD_SHARE_MAX

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

GROUP = 0
"""Supported models have one KV cache group."""


class PoolBlockAllocator:
    """See ``connector.reader.prefetch.BlockAllocator``. Used on the scheduler's thread."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens

    @property
    def fetch_blocks_max(self) -> int:
        """Blocks that all fetches together may pin."""
        return int(self._pool.num_gpu_blocks * HELD_SHARE_MAX)

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Pin the longest cached prefix of these."""
        found = (self._pool.get_cached_block(BlockHash(name), [GROUP]) for name in hashes)
        blocks = [cached[0] for cached in takewhile(bool, found)]
        self._pool.touch(blocks)
        return [block.block_id for block in blocks]

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content; none if too few would remain for requests."""
        spare = self._pool.get_num_free_blocks() - int(self._pool.num_gpu_blocks * FREE_SHARE_MIN)
        count = min(count, spare)
        return [block.block_id for block in self._pool.get_new_blocks(count)] if count > 0 else []

    def cache(self, hashes: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        """Put the blocks into the prefix cache and publish the KV event.

        ``BlockPool.cache_full_blocks`` does this only for a Request. For blocks without one there is no public method.
        """
        pool = self._pool
        if not blocks or not pool.enable_caching:
            return
        named = [BlockHash(name) for name in hashes[first : first + len(blocks)]]
        for behind, (name, block_id) in enumerate(zip(named, blocks, strict=True), start=first + 1):
            key = make_block_hash_with_group_id(name, GROUP)
            pool._insert_block_hash(key, pool.blocks[block_id], num_tokens=behind * self._block_tokens)
        if pool.enable_kv_cache_events:
            parent = maybe_convert_block_hash(BlockHash(hashes[first - 1])) if first else None
            pool.kv_event_queue.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(name) for name in named],
                    parent_block_hash=parent,
                    token_ids=[],
                    block_size=self._block_tokens,
                    lora_id=None,
                    medium=pool.medium,
                    lora_name=None,
                    group_idx=GROUP,
                )
            )

    def free(self, blocks: Sequence[int]) -> None:
        """Last blocks first, so that the end of a prefix is evicted before its beginning."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(blocks)])
