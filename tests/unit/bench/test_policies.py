"""Each baseline chooses as its publication says, on an example made by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.policies.base import LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from bench.policies.other_systems import DynamoKvCost, LlmDScorer, LlmDSticky, MooncakeConductor
from bench.policies.routed_prompts import ProductionStack, SglangCacheAware, SglangExact, VllmRouter
from replay.legs import ReplayedRequest
from replay.simworker import MODEL
from replay.split import Split
from replay.traces import Request
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.kv_events import KvEvent, KvEventBatch, KvEventKind, pack_hashes
from tests.support.fleet_builders import load
from tests.support.replay_worlds import context, world


@pytest.fixture
def of():
    made = world(Split(both=3))
    made.counts.replayed = ReplayedRequest(0, Request(0.0, (1, 2, 3, 4), 2100, 1), (11, 12, 13, 14))
    return made


@pytest.fixture
def ids(of):
    return list(of.workers)


def request(tokens: int = 2100, hashes=(11, 12, 13, 14)) -> PlacementRequest:
    return PlacementRequest(model=MODEL, prompt_tokens=tokens, hashes=hashes)


def holds(of, worker_id, hashes):
    events = [KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes(hashes))]
    of.fleet.index.apply(KvEventBatch(worker_id=worker_id, epoch=1, seq=1, events=events))


def chosen(policy, given=None):
    placement = policy.place(given or request(), 1.0)
    assert isinstance(placement, Placement)
    return placement.decode.record.worker_id


def test_random_chooses_every_worker_eventually(of, ids):
    policy = RandomChoice(context(of))

    assert {chosen(policy) for _ in range(50)} == set(ids)


def test_round_robin_goes_round(of, ids):
    policy = RoundRobin(context(of))

    assert [chosen(policy) for _ in range(4)] == [*ids, ids[0]]


def test_the_least_loaded_has_the_fewest_requests_in_flight(of, ids):
    for worker_id, requests in zip(ids, (3, 1, 2), strict=True):
        of.counts.active[worker_id].requests = requests

    assert chosen(LeastLoaded(context(of))) == ids[1]


def test_of_two_random_workers_the_less_loaded_is_taken(of, ids):
    for worker_id, requests in zip(ids, (9, 5, 1), strict=True):
        of.counts.active[worker_id].requests = requests
    policy = PowerOfTwo(context(of))
    counts = Counter(chosen(policy) for _ in range(300))

    assert counts[ids[0]] == 0  # whoever it is compared with has less
    assert 60 < counts[ids[1]] < 140  # a third: only against the first
    assert 160 < counts[ids[2]] < 240


def test_dynamos_cost_adds_prefill_blocks_without_overlap_and_decode_blocks(of, ids):
    holds(of, ids[0], [11, 12, 13])
    of.counts.active[ids[0]].blocks.update(range(100, 104))  # 2100/512 - 3 + 4 + 4 = 9.1 blocks
    of.counts.active[ids[1]].prefill_tokens = 512 * 2  # 6.1 + 4 = 10.1 blocks
    of.counts.active[ids[2]].blocks.update(range(100, 103))  # 4.1 + 3 + 4 = 11.1 blocks

    assert chosen(DynamoKvCost(context(of))) == ids[0]
    assert chosen(DynamoKvCost(context(of), credit=0.5)) == ids[1]


def test_dynamo_counts_a_block_that_several_requests_hold_once(of, ids):
    of.counts.active[ids[0]].blocks.update([11, 12, 13, 14])  # 4.1 + 4 blocks
    of.counts.active[ids[1]].blocks.update([99])  # 4.1 + 5
    of.counts.active[ids[2]].blocks.update([98])

    assert chosen(DynamoKvCost(context(of))) == ids[0]


def test_llm_ds_scores_are_weighed(of, ids):
    holds(of, ids[0], [11, 12])
    reports = [(4, 80), (0, 40), (2, 0)]  # waiting, blocks used of 100
    for worker_id, (waiting, used) in zip(ids, reports, strict=True):
        of.fleet.cluster.report(load(worker_id, waiting=waiting, kv_tokens_used=used, kv_tokens_total=100), 0.5)

    assert chosen(LlmDScorer(context(of))) == ids[1]  # 3*.5+2*0+2*.2 = 1.9; 0+2*1+2*.6 = 3.2; 0+2*.5+2*1 = 3.0
    assert chosen(LlmDScorer(context(of), prefix=10.0)) == ids[0]
    assert chosen(LlmDScorer(context(of), prefix=0.0, queue=0.0)) == ids[2]


def test_sglang_follows_its_tree_unless_the_load_is_out_of_balance(of, ids):
    policy = SglangCacheAware(context(of), abs_=4, rel=1.5)
    first = chosen(policy)

    assert chosen(policy) == first
    of.counts.active[first].requests = 5
    assert chosen(policy) != first


def test_sglang_sends_a_prompt_that_matches_too_little_to_the_least_loaded(of, ids):
    policy = SglangCacheAware(context(of))
    of.counts.active[ids[0]].requests = of.counts.active[ids[2]].requests = 1
    assert chosen(policy) == ids[1]
    of.counts.active[ids[1]].requests = 2
    of.counts.active[ids[2]].requests = 0

    assert chosen(policy, request(2100, (11, 99, 98, 97))) == ids[2]  # a quarter of it is less than 0.3
    assert chosen(policy, request(2100, (11, 12, 98, 97))) == ids[1]


def test_sglang_with_kv_events_takes_the_largest_overlap_then_the_less_loaded(of, ids):
    holds(of, ids[0], [11, 12])
    holds(of, ids[2], [11, 12])
    of.counts.active[ids[0]].requests = 1

    assert chosen(SglangExact(context(of))) == ids[2]


def test_mooncake_minimises_ttft_and_fetches_a_longer_prefix(of, ids):
    holds(of, ids[0], [11, 12, 13, 14])
    of.counts.active[ids[0]].prefill_s = 2.0
    of.counts.active[ids[1]].prefill_s = 0.5
    placement = MooncakeConductor(context(of)).place(request(), 1.0)

    assert placement.decode.record.worker_id == ids[2]
    assert [(source.worker_id, source.first, source.end) for source in placement.sources] == [(ids[0], 0, 4)]
    assert (placement.cached_tokens, placement.fetched_tokens, placement.uncached_tokens) == (0, 2048, 52)


def test_mooncake_computes_what_is_not_longer_by_the_threshold(of, ids):
    holds(of, ids[0], [11, 12, 13, 14])
    holds(of, ids[1], [11, 12, 13])
    of.counts.active[ids[0]].prefill_s = of.counts.active[ids[2]].prefill_s = 2.0

    assert MooncakeConductor(context(of), threshold=1.2).place(request(), 1.0).sources
    assert MooncakeConductor(context(of), threshold=1.5).place(request(), 1.0).sources == ()


def test_mooncake_rejects_requests_that_would_miss_the_target_if_configured(of, ids):
    of.fleet.placer = MooncakeConductor(context(of), margin=1.0)
    assert isinstance(of.fleet.placer.place(request(), 1.0), Placement)
    for worker_id in ids:
        of.counts.active[worker_id].prefill_s = 6.0

    assert isinstance(of.fleet.placer.place(request(), 1.0), Rejection)


def test_a_margin_makes_mooncake_reject_before_the_target_is_missed(of, ids):
    for worker_id in ids:
        of.counts.active[worker_id].prefill_s = 3.0

    assert isinstance(MooncakeConductor(context(of), margin=1.0).place(request(), 1.0), Placement)
    assert isinstance(MooncakeConductor(context(of), margin=0.5).place(request(), 1.0), Rejection)


def test_dynamos_credit_decays_with_the_load_above_the_least_loaded(of, ids):
    holds(of, ids[0], [11, 12, 13, 14])
    of.counts.active[ids[0]].prefill_tokens = 512 * 3

    assert chosen(DynamoKvCost(context(of))) == ids[0]  # 3 + 5 - 4 + 5 = 9 blocks, others 10
    assert chosen(DynamoKvCost(context(of), decay=1.0)) != ids[0]  # 8 - 4 / 1.6 + 5 = 10.5


def test_llm_d_sticks_to_the_prefix_until_its_backlog_exceeds_the_penalty(of, ids):
    holds(of, ids[0], [11, 12, 13, 14])
    policy = LlmDSticky(context(of), penalty_s=1.0)
    of.counts.active[ids[0]].prefill_tokens = 10_000
    assert chosen(policy) == ids[0]
    of.counts.active[ids[1]].prefill_tokens = 1
    of.counts.active[ids[0]].prefill_tokens = 21_000  # at 20,000 tokens/s

    assert chosen(policy) == ids[2]
    assert chosen(LlmDSticky(context(of))) == ids[0]  # 18 s of work
    assert chosen(LlmDSticky(context(of)), request(2100, (11, 12, 13, 99))) == ids[2]  # three quarters do not stick


def test_sglang_breaks_ties_by_requests_sent_and_vllm_by_order(of, ids):
    others = [(2100, (base, base + 1, base + 2, base + 3)) for base in (100, 200, 300, 400)]
    sglang, vllm = SglangCacheAware(context(of)), VllmRouter(context(of))

    assert [chosen(sglang, request(*one)) for one in others] == [*ids, ids[0]]
    assert [chosen(vllm, request(*one)) for one in others] == [ids[0]] * 4


def test_the_production_stack_follows_the_prefix_whatever_the_load(of, ids):
    policy = ProductionStack(context(of))
    first = chosen(policy)
    of.counts.active[first].requests = 1000

    assert chosen(policy, request(2100, (11, 99, 98, 97))) == first


def test_the_production_stack_goes_by_requests_per_second_below_its_minimum(of, ids):
    policy = ProductionStack(context(of), tokens_min=4096)

    assert {chosen(policy) for _ in ids} == set(ids)
