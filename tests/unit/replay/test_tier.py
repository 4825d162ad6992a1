"""A tier in host memory, replayed: what it copies and lends, and that it takes nothing away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.world import PolicyWorld
from replay.legs import ReplayedRequest
from replay.profile import PROFILES, Profile
from replay.split import Split
from replay.traces import Request
from services.router.admission.policy import AdmissionPolicy
from services.router.state.prefix_index import IndexState
from tests.support.replay_worlds import PROFILE, conversations, world

BLOCK = 32
"""Of a real engine on CPU."""
TOKENS = 4000
FULL = TOKENS // BLOCK
REAL = replace(PROFILES["8b"], block_tokens=BLOCK, kv_blocks=(24 << 20) // (BLOCK * 2048), kv_bytes_per_token=2048)
"""The engine of ``tests/nightly/engines/test_host_memory.py``: KV of three conversations."""
STORE_BYTES = 40 << 20
"""That test's store: five conversations."""
GAP_S = 5.0
MEMORY = 40 * 512 * 131_072


def alone(at_s: float, conversation: int) -> Request:
    return Request(at_s, tuple(range(1000 * conversation, 1000 * conversation + FULL)), TOKENS, 2)


def returning(fillers: int, memory_bytes: int, profile: Profile = REAL) -> tuple[PolicyWorld, ReplayedRequest]:
    """One conversation, a second one, ``fillers`` others, and the second one again."""
    of = PolicyWorld(Split(both=1), profile, host_memory_bytes=memory_bytes)
    order = [99, 0, *range(1, fillers + 1), 0]
    *_others, last = of.run([alone(GAP_S * number, conversation) for number, conversation in enumerate(order)])
    return of, last


def test_an_evicted_conversation_comes_back_from_the_store():
    _of, without = returning(4, 0)
    _of, last = returning(4, STORE_BYTES)

    assert (without.cached_tokens, without.fetched_tokens) == (0, 0)
    assert (last.cached_tokens, last.tier_tokens) == (0, TOKENS - BLOCK), "all but the block of the last token"
    assert last.fetched_tokens == last.tier_tokens
    assert last.ttft_s < 0.5 * without.ttft_s


def test_as_much_is_copied_as_of_a_real_engine():
    """In the nightly test, a store that joins when its engine has three conversations and seven blocks of another one
    holds these seven blocks and five conversations after four more: all but the last two, with nothing lost.
    """
    for conversations_before in (3, 6, 9):
        of = PolicyWorld(Split(both=1), REAL, host_memory_bytes=STORE_BYTES)
        of.run([alone(GAP_S * number, number) for number in range(conversations_before + 1)])  # No round ends after it.
        (copying,) = of.tier.copying
        assert copying.copied_blocks == FULL * (conversations_before - 2)
        assert copying.lost_blocks == 0


def test_a_host_s_store_is_read_over_the_link_to_its_memory():
    _of, last = returning(4, STORE_BYTES, replace(REAL, transfer_bytes_per_s=1e6))
    _of, slow = returning(4, STORE_BYTES, replace(REAL, host_bytes_per_s=1e7))

    assert last.ttft_s < 0.1
    assert slow.ttft_s > last.tier_tokens * 2048 / 1e7


def test_a_store_never_holds_more_than_its_memory():
    of, last = returning(12, STORE_BYTES)

    (store,) = of.tier.stores.values()
    assert store.tiers.memory.blocks == STORE_BYTES // (BLOCK * 2048)
    assert store.tiers.memory.evicted_total > 0
    assert last.fetched_tokens == 0, "the store has evicted it, too"


@pytest.mark.parametrize("split", [Split(both=3), Split(prefill=2, decode=2), Split(both=10)], ids=str)
def test_every_request_ends_and_all_blocks_come_back_with_a_store(split):
    of = PolicyWorld(split, replace(PROFILE, kv_blocks=34), host_memory_bytes=MEMORY)
    of.admit(AdmissionPolicy())
    outcomes = of.run(conversations(400, per_s=8.0))
    of._knowledge.catch_up(1e9)

    assert sum(one.tier_tokens for one in outcomes) > 0
    for one in outcomes:
        assert one.finished_at is not None
        assert 0 <= one.tier_tokens <= one.fetched_tokens
        assert one.cached_tokens + one.fetched_tokens < one.request.input_tokens
    for worker in of.workers.values():
        pool = worker.engine.pool
        assert (pool.free, pool.holders, worker.engine.queued) == (pool.blocks, {}, 0)
    for store in of.tier.stores.values():
        memory = store.tiers.memory
        assert memory.free == memory.blocks, "no block is held"
        assert of.fleet.index.state(store.worker_id) is IndexState.EXACT
        names = [int.from_bytes(name[:8], "big") for name in memory.hashes()]
        assert all(of.fleet.index.match([name]).get(store.worker_id) == 1 for name in names)


def test_the_same_seed_gives_the_same_run_with_a_store():
    def times() -> list[tuple[float | None, int]]:
        of = PolicyWorld(Split(both=3), PROFILE, host_memory_bytes=MEMORY)
        return [(one.finished_at, one.tier_tokens) for one in of.run(conversations(120))]

    assert times() == times()


def test_workers_of_each_eight_have_a_store():
    of = PolicyWorld(Split(both=17), PROFILE, host_memory_bytes=MEMORY)

    assert sorted(of.tier.stores) == ["store-host-0", "store-host-1", "store-host-2"]
    assert world().tier is None


@pytest.mark.parametrize("more", [{"host_blocks": 10}, {"groups": "state"}], ids=["own memory", "states"])
def test_what_a_store_is_not_simulated_with_is_refused(more):
    with pytest.raises(ValueError, match="models with full attention alone, without --host-blocks"):
        PolicyWorld(Split(both=1), replace(PROFILE, **more), host_memory_bytes=MEMORY)
