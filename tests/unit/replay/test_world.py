"""The replay itself: nothing is lost, nothing is invented, and the seed decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.oracle import Oracle
from bench.policies.systems import BASELINES
from bench.policies.world import PolicyWorld
from replay.legs import ReplayedRequest
from replay.profile import Profile
from replay.router import NETWORK_S
from replay.split import Split
from replay.traces import Request
from services.router.admission.policy import AdmissionPolicy
from services.router.placement.slo import Targets
from services.router.state.prefix_index import IndexState
from shared.contracts.workers import Role
from tests.support.replay_worlds import PROFILE, conversations, with_baseline, world

SPLITS = [Split(both=3), Split(prefill=2, decode=2), Split(both=1, prefill=1, decode=1)]


def outcome(outcomes: list[ReplayedRequest]) -> list[tuple[float | None, float | None, int, int]]:
    return [(one.first_token_at, one.finished_at, one.cached_tokens, one.fetched_tokens) for one in outcomes]


def made(name: str, split: Split) -> PolicyWorld:
    of = world(split)
    if name == "oracle":
        of.fleet.placer = Oracle(of)
    elif name == "baton-waiting":
        of.admit(AdmissionPolicy())
    elif name != "baton":
        with_baseline(of, name)
    return of


@pytest.mark.parametrize("groups", ["state", "window"])
@pytest.mark.parametrize("split", SPLITS, ids=["both", "apart", "mixed"])
def test_all_blocks_of_all_groups_come_back(split, groups):
    of = world(split, with_groups(groups, 120))
    for replayed in of.run(conversations(60)):
        assert replayed.finished_at is not None
    of._knowledge.catch_up(1e9)
    for worker in of.workers.values():
        pool = worker.engine.pool
        assert (pool.free, pool.holders) == (pool.blocks, {})


@pytest.mark.parametrize("split", SPLITS, ids=["both", "apart", "mixed"])
@pytest.mark.parametrize("name", ["baton", "baton-waiting", "oracle", *BASELINES])
def test_every_request_ends_once_and_all_blocks_come_back(name, split):
    of = made(name, split)
    requests = conversations(60)
    outcomes = of.run(requests)

    assert [replayed.request for replayed in outcomes] == requests
    for replayed in outcomes:
        assert (replayed.finished_at is None) == (replayed.refused_at is not None)
        if replayed.finished_at is not None:
            assert replayed.request.at_s + NETWORK_S < replayed.first_token_at <= replayed.finished_at
            assert 0 <= replayed.cached_tokens + replayed.fetched_tokens < replayed.request.input_tokens
    for worker in of.workers.values():
        engine = worker.engine
        assert worker.legs == engine.queued == len(engine.running) == engine.waiting_tokens == 0
        assert engine.pool.free == engine.pool.blocks
        assert engine.pool.holders == {}


@pytest.mark.parametrize("name", ["baton", "baton-waiting", "random", "power-of-two", "sglang", "oracle"])
def test_the_same_seed_gives_the_same_run(name):
    first, second = (outcome(made(name, Split(both=3)).run(conversations(50))) for _ in range(2))

    assert first == second


def test_another_seed_gives_another_run():
    runs = [outcome(with_baseline(world(), "random", seed).run(conversations(50))) for seed in (1, 2)]

    assert runs[0] != runs[1]


def test_the_routers_index_knows_exactly_what_the_engines_hold():
    of = with_baseline(world(), "round-robin")
    of.run(conversations(60))
    of._knowledge.catch_up(1e9)

    for worker in of.workers.values():
        held = [*worker.engine.pool.free_named]
        assert held
        assert of.fleet.index.state(worker.worker_id) is IndexState.EXACT
        assert all(of.fleet.index.match([name]).get(worker.worker_id) == 1 for name in held)


def test_a_lone_request_takes_the_models_time():
    of = with_baseline(world(Split(both=1)), "random")
    (replayed,) = of.run([Request(0.0, (1, 2), 1400, 11)])
    step_s = PROFILE.decode_base_s + 1405.5 * PROFILE.decode_per_context_token_s

    assert replayed.ttft_s == pytest.approx(PROFILE.prompt_s(1400, 0) + 2 * NETWORK_S)
    assert replayed.tpot_s == pytest.approx(step_s, rel=1e-3)


def test_a_prompt_seen_before_is_computed_behind_what_is_cached():
    of = with_baseline(world(Split(both=1)), "random")
    _first, second = of.run([Request(0.0, (1, 2), 1400, 3), Request(5.0, (1, 2), 1400, 3)])

    assert second.cached_tokens == 1024
    assert second.ttft_s == pytest.approx(PROFILE.prompt_s(1400, 1024) + 2 * NETWORK_S)


def test_a_handoff_that_is_streamed_takes_hardly_longer_than_the_prompt():
    of = with_baseline(world(Split(prefill=1, decode=1)), "random")
    (replayed,) = of.run([Request(0.0, tuple(range(12)), 6300, 3)])

    assert replayed.placement is not None
    assert replayed.placement.streamed
    assert 0.0 < replayed.ttft_s - PROFILE.prompt_s(6300, 0) < 0.05


def test_requests_that_would_be_late_wait_and_are_rejected():
    of = world(Split(both=1))
    of.targets = Targets(ttft_s=1.0)
    of.admit(AdmissionPolicy())
    outcomes = of.run([Request(number / 100, (), 9000, 5) for number in range(60)])

    refused = [replayed for replayed in outcomes if replayed.refused_at is not None]
    assert 10 < len(refused) < 60
    # Six of them, of half a second each, before the engine is known to be as fast as that: nobody waits for thirty.
    assert all(replayed.ttft_s < 4.0 for replayed in outcomes if replayed.finished_at is not None)


def with_groups(groups: str, kv_blocks: int = 400) -> Profile:
    return replace(PROFILE, groups=groups, kv_blocks=kv_blocks)


@pytest.mark.parametrize("kv_blocks", [400, 90], ids=["all kept", "evicted"])
@pytest.mark.parametrize("groups", ["state", "window"])
def test_cached_tokens_of_a_model_with_groups_are_predicted_exactly(groups, kv_blocks):
    """One conversation goes on after another, so that nothing changes between a placement and its prompt."""
    requests = conversations(80, per_s=0.1)
    served = world(Split(both=1), with_groups(groups, kv_blocks)).run(requests)
    plain = world(Split(both=1), with_groups("full", kv_blocks)).run(requests)

    assert [one.cached_tokens for one in served] == [one.placement.cached_tokens for one in served]
    assert sum(one.cached_tokens for one in served) > 0
    if kv_blocks < 400 or groups == "state":
        assert sum(one.cached_tokens for one in served) < sum(one.cached_tokens for one in plain)


@pytest.mark.parametrize("groups", ["state", "window"])
def test_a_prompt_continues_where_the_other_groups_have_what_it_needs(groups):
    """The second prompt leaves the first one within it: a state is kept at its end only, a window at each block."""
    blocks = tuple(range(8))
    of = world(Split(both=1), with_groups(groups))
    first, within, longer = of.run(
        [
            Request(0.0, blocks, 8 * 512 + 9, 3),
            Request(9.0, (*blocks[:5], 100), 6 * 512 + 9, 3),
            Request(18.0, (*blocks, 200), 9 * 512 + 9, 3),
        ]
    )

    assert first.cached_tokens == 0
    assert within.cached_tokens == (5 * 512 if groups == "window" else 0)
    assert longer.cached_tokens == 8 * 512


@pytest.mark.parametrize(("groups", "kept"), [("full", 0), ("state", 3), ("window", 5 * 8)])
def test_a_handoff_reads_the_bytes_of_all_groups(groups, kept):
    of = world(Split(prefill=1, decode=1), with_groups(groups))
    (replayed,) = of.run([Request(0.0, tuple(range(12)), 6300, 3)])
    (decode,) = (worker for worker in of.workers.values() if worker.record.role is Role.DECODE)

    assert replayed.placement is not None
    tokens = 6300 - PROFILE.tail_tokens
    assert decode.load_now().received_bytes_total == (tokens + kept * 512) * PROFILE.kv_bytes_per_token
    assert decode.record.kv_boundary_bytes == kept * 512 * PROFILE.kv_bytes_per_token


def test_states_that_are_written_take_memory_from_requests_that_run():
    """As many answers as the KV cache has room for: fewer where each writes states as well."""
    requests = [Request(0.0, (), 400, 100) for _number in range(16)]
    at_once = {}
    for groups in ("full", "state"):
        of = world(Split(both=1), with_groups(groups, 16))
        outcomes = of.run(requests)
        first = min(one.finished_at for one in outcomes)
        at_once[groups] = sum(one.first_token_at < first for one in outcomes)

    assert at_once["full"] == 16
    assert at_once["state"] == 16 // 4
