"""Slow workers, noise, fleets by name, and host memory behind the KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.oracle import Oracle
from bench.policies.world import PolicyWorld
from bench.study.workloads import generate
from replay.block_pool import HostTier
from replay.router import NETWORK_S
from replay.split import Split
from replay.traces import Request
from shared.contracts.kv_events import KvEventKind, KvTier
from tests.support.replay_worlds import PROFILE, conversations, with_baseline, world

STEP_MODELS = ["linear", "roofline", "table"]


@pytest.mark.parametrize("step_model", STEP_MODELS)
def test_a_slow_worker_takes_longer_by_its_factor(step_model):
    profile = replace(PROFILE, step_model=step_model)
    request = Request(0.0, (1, 2), 1400, 40)
    (usual,), (slow,) = (
        with_baseline(PolicyWorld(Split(both=1), profile, slow=speeds), "random").run([request])
        for speeds in ({}, {0: 0.5})
    )

    assert slow.ttft_s - 2 * NETWORK_S == pytest.approx(2 * (usual.ttft_s - 2 * NETWORK_S))
    assert slow.tpot_s == pytest.approx(2 * usual.tpot_s)
    assert usual.ttft_s == pytest.approx(profile.prompt_s(1400, 0) + 2 * NETWORK_S)


@pytest.mark.parametrize("step_model", STEP_MODELS)
def test_noise_is_decided_by_the_seed_and_differs_between_workers(step_model):
    profile = replace(PROFILE, step_model=step_model, noise=0.2)

    def run(seed: int) -> list[tuple[float | None, float | None]]:
        of = with_baseline(PolicyWorld(Split(both=2), profile, seed=seed), "round-robin")
        outcomes = of.run([Request(60.0 * number, (), 1400, 40) for number in range(4)])
        return [(round(one.ttft_s, 9), round(one.tpot_s, 9)) for one in outcomes]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(set(run(1)[:2])) == 2


def test_baton_learns_which_worker_is_slow():
    of = PolicyWorld(Split(both=3), replace(PROFILE, kv_blocks=400), slow={1: 0.3})
    outcomes = of.run(conversations(250, per_s=5.0))
    counts = [0, 0, 0]
    for replayed in outcomes[50:]:
        counts[int(replayed.placement.decode.record.worker_id[-4:])] += 1

    assert counts[1] < min(counts[0], counts[2]) / 2


def test_host_memory_evicts_the_least_recently_used_and_tells():
    changes = []
    host = HostTier(3, changes)
    for name, parent in [(1, None), (2, 1), (3, 2)]:
        host.store(name, parent)
    host.use([1, 3])
    host.store(4, 3)

    assert list(host.held) == [3, 1, 4]
    assert [(one.kind, one.names, one.tier) for one in changes] == [
        (KvEventKind.STORED, [1, 2, 3, 4], KvTier.HOST),
        (KvEventKind.REMOVED, [2], KvTier.HOST),
    ]
    assert host.depth([1, 2], 0, 2) == 1
    assert host.depth([9, 1, 4, 3], 1, 3) == 3


def evicting(host_blocks: int) -> tuple[PolicyWorld, list[Request]]:
    """A prompt, others that evict it from the cache, and the prompt again."""
    others = [Request(10.0 + 5 * number, tuple(range(100 * number, 100 * number + 50)), 25_700, 2) for number in (1, 2)]
    again = [Request(at_s, tuple(range(20)), 10_300, 2) for at_s in (0.0, 40.0)]
    of = PolicyWorld(Split(both=1), replace(PROFILE, host_blocks=host_blocks))
    return with_baseline(of, "random"), [again[0], *others, again[1]]


def test_an_evicted_prefix_is_loaded_from_host_memory():
    of, requests = evicting(500)
    *_, loaded = of.run(requests)
    of_none, _ = evicting(0)
    *_, computed = of_none.run(requests)

    assert computed.cached_tokens == 0
    assert loaded.cached_tokens == 20 * 512
    assert loaded.fetched_tokens == 0
    seconds = PROFILE.transfer_base_s + 20 * 512 * PROFILE.kv_bytes_per_token / PROFILE.host_bytes_per_s
    assert loaded.ttft_s == pytest.approx(PROFILE.prompt_s(10_300, 20 * 512) + seconds + 2 * NETWORK_S)
    assert computed.ttft_s == pytest.approx(PROFILE.prompt_s(10_300, 0) + 2 * NETWORK_S)


def test_too_little_host_memory_is_no_help():
    of, requests = evicting(90)
    *_, again = of.run(requests)

    assert again.cached_tokens == 0


def test_host_memory_keeps_what_prompts_in_the_cache_go_on_using():
    of = with_baseline(PolicyWorld(Split(both=1), replace(PROFILE, host_blocks=60)), "random")
    often = [Request(10.0 * number, tuple(range(10)), 5_130, 2) for number in range(8)]
    others = [
        Request(5.0 + 10.0 * number, tuple(range(100 * number, 100 * number + 9)), 4_700, 2) for number in range(1, 8)
    ]
    outcomes = of.run(sorted([*often, *others], key=lambda request: request.at_s))
    (worker,) = of.workers.values()

    assert len(worker.engine.host.held) == 60
    assert all(name in worker.engine.host.held for name in outcomes[0].chain)


def test_the_router_knows_what_host_memory_holds():
    of, requests = evicting(500)
    of.run(requests)
    of._knowledge.catch_up(1e9)
    (worker,) = of.workers.values()

    chain = [*worker.engine.host.held][:20]

    assert not any(worker.engine.pool.has(name) for name in chain[10:])
    assert of.fleet.index.match(chain)[worker.worker_id] == 20


@pytest.mark.parametrize("split", [Split(both=3), Split(prefill=2, decode=2)], ids=str)
@pytest.mark.parametrize("step_model", STEP_MODELS)
@pytest.mark.parametrize("name", ["baton", "mooncake", "oracle"])
def test_every_request_ends_and_all_blocks_come_back_in_any_fleet(name, step_model, split):
    profile = replace(PROFILE, kv_blocks=100, step_model=step_model, noise=0.1, host_blocks=300)
    of = PolicyWorld(split, profile, slow={1: 0.6}, seed=3)
    if name == "mooncake":
        with_baseline(of, name)
    elif name == "oracle":
        of.fleet.placer = Oracle(of)
    requests = conversations(40) + [
        replace(request, session=request.session + 1)
        for request in generate("code", 60, seed=2, per_s=4.0)
        if request.input_tokens < 30_000
    ]
    outcomes = of.run(requests)

    for replayed in outcomes:
        assert replayed.finished_at is not None
        assert 0 <= replayed.cached_tokens + replayed.fetched_tokens < replayed.request.input_tokens
    for worker in of.workers.values():
        engine = worker.engine
        assert worker.legs == engine.queued == len(engine.running) == engine.waiting_tokens == 0
        assert engine.pool.free == engine.pool.blocks
        assert len(engine.host.held) <= 300


def test_host_memory_raises_the_hits_of_conversations():
    def hits(host_blocks: int) -> float:
        of = with_baseline(world(Split(both=2), replace(PROFILE, kv_blocks=30, host_blocks=host_blocks)), "round-robin")
        return sum(one.cached_tokens for one in of.run(conversations(80)))

    assert hits(2000) > 1.3 * hits(0)
