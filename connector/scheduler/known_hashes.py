"""Hashes of blocks that the engine has seen before, without computing them again.

EngineCore hashes every block of a request when it comes, also of a conversation's known history: 6 to 10 us for a
block, while the thread that schedules waits for the interpreter. A block's hash depends on its parent's and on its own
content, so these name it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

BLOCKS_MAX = 1 << 16
"""Blocks in each of two generations: 20 MB when all are full."""
Block = tuple[bytes, tuple[int, ...], tuple[Any, ...] | None]
"""What vLLM hashes: the parent's hash, tokens, and keys of salt, adapter and media."""


class KnownHashes:
    """In place of the function that hashes one block. Safe to call from several threads: all compute the same."""

    def __init__(self, compute: Callable[[Block], bytes], blocks_max: int = BLOCKS_MAX) -> None:
        self._compute = compute
        self._blocks_max = blocks_max
        self._recent: dict[object, bytes] = {}
        self._older: dict[object, bytes] = {}

    def __call__(self, block: Block) -> bytes:
        parent, tokens, keys = block
        try:
            name = (parent, array("I", tokens).tobytes(), keys)
        except OverflowError:
            return self._compute(block)
        recent = self._recent
        found = recent.get(name)
        if found is None:
            found = self._older.get(name)
            if found is None:
                found = self._compute(block)
            if len(recent) >= self._blocks_max:
                self._older, self._recent = recent, {}
            self._recent[name] = found
        return found


def remember_hashes(core: Any) -> None:
    """From now on this EngineCore remembers the hashes of its requests."""
    if getattr(core, "request_block_hasher", None) is None:
        return
    compute = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
    block_tokens = core.scheduler.kv_cache_manager.block_pool.hash_block_size
    core.request_block_hasher = get_request_block_hasher(block_tokens, KnownHashes(compute))
