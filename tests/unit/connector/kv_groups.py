"""KV cache groups of models with windows and states, as vLLM configures and manages them without a scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from connector.groups import GroupPlan
from tests.unit.connector.real_scheduler import PLAIN, Layout, full, spec_of, state, window

LAYOUTS = {
    "full": PLAIN,
    "full and window": Layout((full(16), window(16, 40))),
    "windows first": Layout((window(16, 40), window(16, 40), full(16))),
    "two block sizes": Layout((window(16, 40), full(32))),
    "two kinds of full attention": Layout((full(16), full(32), window(16, 33))),
    "windows of two widths": Layout((window(16, 64), full(16), window(16, 17))),
    "states": Layout((state(32), state(32), state(32), full(32)), unit=32),
    "states and unit": Layout((state(64), state(64), state(64), full(64))),
    "states and half a block": Layout((state(32), state(32), full(32))),
    "state and window": Layout((full(32), window(32, 50), state(32)), unit=32),
    "one window": Layout((window(16, 40),)),
    "window and drafter": Layout((full(16), window(16, 40)), drafts=True),
    "two block sizes and drafter": Layout((window(16, 40), full(32)), drafts=True),
    "long window blocks and drafter": Layout((full(16), window(32, 40)), drafts=True),
    "one window and drafter": Layout((window(16, 40),), drafts=True),
}
SEVERAL = {name: layout for name, layout in LAYOUTS.items() if len(layout.groups) > 1 and not layout.drafts}


def cache_config_of(layout: Layout, blocks: int, *, retention: int | None = 0) -> Any:
    """VLLM's configuration of the groups. ``retention``: see vLLM's ``prefix_cache_retention_interval``."""
    pytest.importorskip("vllm.v1.core.kv_cache_utils")
    from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([f"layer {number}"], spec_of(group, caches=True)) for number, group in enumerate(layout.groups)
    ]
    is_fine = len(groups) > 1 and partial_hash_hits_enabled(groups, layout.unit, 1)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hash_block_size=layout.unit,
        cache_hit_alignment_tokens=layout.unit if is_fine else layout.block_size,
        prefix_cache_retention_interval=retention if len(groups) > 1 else None,
    )


def plan_of(config: Any) -> GroupPlan:
    from connector.layout.engine_layout import groups_of

    return GroupPlan(groups_of(config), config.hash_block_size, config.cache_hit_alignment_tokens)


def manager_of(layout: Layout, blocks: int, *, retention: int | None = None, events: bool = False) -> Any:
    """VLLM's manager of the groups' blocks."""
    config = cache_config_of(layout, blocks, retention=retention)
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager(
        kv_cache_config=config,
        max_model_len=2048,
        scheduler_block_size=layout.block_size,
        hash_block_size=layout.unit,
        enable_kv_cache_events=events,
    )
