"""What windows save, now that vLLM's hybrid KV cache manager is on under this connector."""

from __future__ import annotations

import pytest

from tests.unit.connector.kv_groups import manager_of
from tests.unit.connector.real_scheduler import Layout, full, window

PROMPT, STEP = 2016, 256
LAYERS = 4
"""Of a tiny gpt-oss: half of them have a window of 64 tokens."""


def held_layers(layout: Layout) -> int:
    """Layers of blocks that a request holds when its prompt is computed, in steps."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    manager = manager_of(layout, 256, retention=0)
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(layout.unit, sha256_cbor)
    request = Request("r", list(range(PROMPT)), SamplingParams(max_tokens=4), None, block_hasher=hasher)
    free = manager.block_pool.get_num_free_blocks()
    while request.num_computed_tokens < PROMPT:
        step = min(STEP, PROMPT - request.num_computed_tokens)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
    assert manager.allocate_slots(request, 1) is not None
    return (free - manager.block_pool.get_num_free_blocks()) * LAYERS // len(layout.groups)


def test_a_long_prompt_takes_little_more_than_its_full_attention():
    """The bound is 0.55 of what it took while all layers kept all blocks."""
    pytest.importorskip("vllm.v1.core.kv_cache_manager")

    now = held_layers(Layout((window(32, 64), full(32)), 32))

    assert now <= 0.55 * held_layers(Layout((full(32),), 32))
