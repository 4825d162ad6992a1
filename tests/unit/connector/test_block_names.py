"""Names of blocks after a change of weights, with vLLM's scheduler."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.connector.real_scheduler import BLOCK_TOKENS, make_scheduler

PROMPT = list(range(4 * BLOCK_TOKENS))


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def core(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """EngineCore, as far as ``rename_blocks`` sees it."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256_cbor)
    scheduler = make_scheduler(tmp_path, asynchronous=request.param, with_connector=True)
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256_cbor")
    yield SimpleNamespace(scheduler=scheduler, vllm_config=SimpleNamespace(cache_config=cache))
    init_none_hash(sha256_cbor)


def request(name: str, prompt: list[int] = PROMPT) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
    )


def held(core: Any, made: Any) -> int:
    """Blocks of the request that the cache has."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return sum(bool(pool.get_cached_block(name, [0])) for name in made.block_hashes)


def test_nothing_cached_is_found_under_new_names_or_old_ones(core):
    from vllm.v1.request import RequestStatus

    from connector.scheduler.block_names import rename_blocks

    before = request("before")
    core.scheduler.add_request(before)
    core.scheduler.schedule()
    core.scheduler.finish_requests(["before"], RequestStatus.FINISHED_ABORTED)
    assert held(core, before) == 4

    rename_blocks(core, "seed 2")

    after = request("after")
    assert not set(before.block_hashes) & set(after.block_hashes)
    assert held(core, before) == held(core, after) == 0


def test_a_running_request_keeps_its_kv_under_its_old_names_and_others_do_not_find_it(core):
    from connector.scheduler.block_names import rename_blocks

    kept = request("kept")
    core.scheduler.add_request(kept)
    core.scheduler.schedule()
    names = list(kept.block_hashes)

    rename_blocks(core, "seed 2")
    other = request("other")
    core.scheduler.add_request(other)

    assert kept.block_hashes == names
    assert not set(names) & set(other.block_hashes)
    assert core.scheduler.kv_cache_manager.get_computed_blocks(other)[1] == 0


def test_a_request_that_waits_or_has_just_been_hashed_gets_new_names(core):
    from connector.scheduler.block_names import rename_blocks

    waiting, hashed = request("waiting"), request("hashed")
    old = list(waiting.block_hashes)
    core.scheduler.add_request(waiting)

    rename_blocks(core, "seed 2")
    core.scheduler.add_request(hashed)

    assert waiting.block_hashes == hashed.block_hashes == request("new").block_hashes
    assert not set(old) & set(waiting.block_hashes)


def test_names_follow_from_the_seed_as_routers_compute_them(core):
    from connector.scheduler.block_names import rename_blocks
    from services.router.tokenize.block_hash import extend_chain
    from shared.contracts.kv_events import block_hash64
    from shared.contracts.workers import HashScheme

    rename_blocks(core, "vllm-none-hash weights step-1#9")

    scheme = HashScheme(block_size=BLOCK_TOKENS, seed="vllm-none-hash weights step-1#9")
    expected, _digest = extend_chain(None, PROMPT, scheme)
    assert [block_hash64(bytes(name)) for name in request("new").block_hashes] == expected


def test_an_empty_seed_only_forgets(core):
    from vllm.v1.request import RequestStatus

    from connector.scheduler.block_names import rename_blocks

    done, runs = request("done"), request("runs", list(range(50, 50 + 2 * BLOCK_TOKENS)))
    for one in (done, runs):
        core.scheduler.add_request(one)
    core.scheduler.schedule()
    core.scheduler.schedule()
    core.scheduler.finish_requests(["done"], RequestStatus.FINISHED_ABORTED)

    rename_blocks(core, "")

    assert held(core, done) == 0
    assert request("again").block_hashes == done.block_hashes
    assert time.time() > core.scheduler.connector.connector_scheduler.renamed_at == 0.0
