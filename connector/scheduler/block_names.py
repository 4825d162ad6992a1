"""Names of blocks after the engine's weights have changed.

A block's hash names its tokens, not the weights that computed its KV. So each set of weights gets a seed of its own,
from which the hashes of all blocks follow: no KV of other weights is ever found, in this engine's cache, on another
worker, in a store or in a router's index, even where it was not dropped.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

LATE_S = 1.0
"""A request that has arrived so long after the change was hashed after it; the clock may be set back meanwhile."""
WITHOUT_KV = frozenset(
    {
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
        RequestStatus.PREEMPTED,
    }
)


def set_seed(seed: str, algorithm: str) -> None:
    """From now on the hashes that this process makes begin with the seed's."""
    kv_cache_utils.NONE_HASH = BlockHash(get_hash_fn_by_name(algorithm)(seed))
    kv_cache_utils._NONE_HASH_SEED = seed


def rename_blocks(core: Any, seed: str) -> None:
    """Utility method added to ``EngineCore``: forget what is cached, and name further blocks by ``seed``, unless it is
    empty. Requests that have KV keep it, under its old names; those that have none get new ones.
    """
    scheduler = core.scheduler
    side = scheduler.connector.connector_scheduler
    with side.calls.lock:
        if seed:
            set_seed(seed, core.vllm_config.cache_config.prefix_caching_hash_algo)
            side.renamed_at = time.time()
            for request in scheduler.requests.values():
                if request.status in WITHOUT_KV and not request.num_computed_tokens:
                    side.reader.restart(request.request_id)
                    rename(request)
        if not scheduler.reset_prefix_cache():
            forget_unused(scheduler.kv_cache_manager.block_pool)


def rename(request: Request) -> None:
    """Hash its blocks again."""
    request.block_hashes.clear()
    request.update_block_hashes()


def rename_if_late(request: Request, renamed_at: float) -> None:
    """Another thread of EngineCore hashes a request before it reaches the scheduler, and may have done so before the
    change. ``renamed_at``: on the wall clock.
    """
    if request.arrival_time < renamed_at + LATE_S:
        rename(request)


def forget_unused(pool: Any) -> None:
    """Drop the names of all blocks that nothing uses. vLLM drops all names, or none while a block is in use."""
    for block in pool.blocks:
        if not block.ref_cnt and not block.is_null:
            pool._maybe_evict_cached_block(block)
