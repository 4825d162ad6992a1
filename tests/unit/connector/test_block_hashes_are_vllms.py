"""The router's and the simulated engine's block hashes equal those of vLLM, which this folder's tests import."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.worker.engines.simulated.core.tokens import ROOT_HASH, BlockHasher
from shared.contracts.workers import HashScheme
from tests.support.block_hashes import block_hashes

VOCABULARY = 70_000
"""More than 16 bits of token id."""


@pytest.mark.parametrize(("salt", "lora"), [("", None), ("tenant-1", None), ("", ("ad", "/p")), ("s", ("ad", "/p"))])
def test_the_routers_chain_is_vllms(salt, lora):
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    hashing = pytest.importorskip("vllm.utils.hashing")
    tokens = [(7 * number) % VOCABULARY for number in range(100)]
    utils.init_none_hash(hashing.sha256_cbor)
    hasher = utils.get_request_block_hasher(32, hashing.sha256_cbor)
    adapter = SimpleNamespace(lora_name=lora[0], lora_path=lora[1]) if lora else None
    request = SimpleNamespace(
        num_tokens=len(tokens),
        all_token_ids=tokens,
        block_hashes=[],
        mm_features=[],
        lora_request=adapter,
        cache_salt=salt or None,
        prompt_embeds=None,
    )

    theirs = [int.from_bytes(full[:8], "big") for full in hasher(request)]

    assert block_hashes(tokens, HashScheme(block_size=32), salt=salt, adapter=lora) == theirs


def test_the_simulated_engines_chain_is_vllms():
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    hashing = pytest.importorskip("vllm.utils.hashing")
    function = hashing.sha256_cbor
    utils.init_none_hash(function)
    tokens, parent, theirs = list(range(500, 600)), utils.NONE_HASH, []
    for start in range(0, 96, 32):
        parent = utils.hash_block_tokens(function, parent, tokens[start : start + 32], None)
        theirs.append(bytes(parent))
    ours: list[bytes] = []

    BlockHasher(32, VOCABULARY).extend(ours, tokens, "")

    assert bytes(utils.NONE_HASH) == ROOT_HASH
    assert ours == theirs
