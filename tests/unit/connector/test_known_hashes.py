"""Remembered block hashes are vLLM's."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

PARENT, OTHER = b"p" * 32, b"q" * 32
BLOCKS = [
    (PARENT, (1, 2, 3), None),
    (OTHER, (1, 2, 3), None),
    (PARENT, (1, 2), None),
    (PARENT, (1, 2, 3), ("salt",)),
    (PARENT, (1, 2, 3), (("adapter", "path"), "salt")),
    (PARENT, (1 << 24, 2, 3), None),
    (PARENT, (1 << 40, 2, 3), None),
]


@pytest.fixture
def computed() -> list:
    return []


@pytest.fixture
def known(computed):
    from connector.scheduler.known_hashes import KnownHashes

    def compute(block):
        computed.append(block)
        return hashlib.sha256(repr(block).encode()).digest()

    return KnownHashes(compute, blocks_max=8)


def test_each_block_is_computed_once(known, computed):
    first = [known(block) for block in BLOCKS]

    assert [known(block) for block in BLOCKS] == first
    assert len(set(first)) == len(BLOCKS)
    assert computed[: len(BLOCKS)] == BLOCKS
    assert computed[len(BLOCKS) :] == [BLOCKS[-1]], "only tokens beyond 32 bits are computed again"


def test_blocks_in_use_are_kept_and_memory_is_bounded(known, computed):
    for number in range(100):
        known((PARENT, (number,), None))
        known(BLOCKS[0])

    assert computed.count(BLOCKS[0]) == 1
    assert len(known._recent) + len(known._older) <= 16


@pytest.mark.parametrize("salt", [None, "s"])
def test_a_request_has_the_hashes_that_vllm_gives_it(salt):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from connector.scheduler.known_hashes import remember_hashes

    init_none_hash(sha256_cbor)
    own = get_request_block_hasher(16, sha256_cbor)
    pool = SimpleNamespace(hash_block_size=16)
    core = SimpleNamespace(
        request_block_hasher=own,
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor")),
        scheduler=SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool)),
    )
    remember_hashes(core)

    def hashes(hasher, tokens):
        request = Request("r", tokens, SamplingParams(max_tokens=9), None, cache_salt=salt, block_hasher=hasher)
        request.append_output_token_ids(list(range(20)))
        return request.block_hashes

    for tokens in ([*range(500)], [*range(300), *range(90_000, 90_200)], [*range(500)]):
        assert hashes(core.request_block_hasher, tokens) == hashes(own, tokens)
