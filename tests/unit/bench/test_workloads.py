"""Made workloads: what a seed decides, what sessions share, and that a closed loop waits for its answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import pytest

from bench.policies.world import PolicyWorld
from bench.study.workloads import CHAT_TURNS_MEAN, NAMES, TENANTS, WORKLOADS, generate, opened
from replay.router import NETWORK_S
from replay.split import Split
from replay.traces import BLOCK_TOKENS, Request, at_load, chains
from services.router.admission.policy import AdmissionPolicy
from services.router.placement.slo import Targets
from tests.support.replay_worlds import PROFILE, with_baseline, world

ROOMY = replace(PROFILE, kv_blocks=200)
"""The longest prompts of the tests fit."""


def sessions(requests: list[Request]) -> list[list[Request]]:
    found = defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return list(found.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_everything(name):
    assert generate(name, 300, seed=3) == generate(name, 300, seed=3)
    assert generate(name, 300, seed=3) != generate(name, 300, seed=4)


@pytest.mark.parametrize("name", NAMES)
def test_requests_come_in_order_and_have_the_blocks_of_their_tokens(name):
    requests = generate(name, 800, seed=1, per_s=2.0)

    assert len(requests) == 800
    assert requests[0].at_s == 0.0
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    for request in requests:
        assert len(request.blocks) == request.input_tokens // BLOCK_TOKENS
        assert len(request.blocks + request.answer) in {
            len(request.blocks), (request.input_tokens + request.output_tokens) // BLOCK_TOKENS,
        }  # fmt: skip


@pytest.mark.parametrize("block_tokens", [16, 512])
@pytest.mark.parametrize("name", ["conversations", "agents"])
def test_a_prompt_begins_with_the_prompt_and_answer_before_it(name, block_tokens):
    pairs = 0
    for session in sessions(generate(name, 400, seed=2, block_tokens=block_tokens)):
        for before, after in pairwise(session):
            known = before.blocks + before.answer
            assert after.blocks[: len(known)] == known
            assert after.input_tokens > before.input_tokens + before.output_tokens
            pairs += 1
    assert pairs > 100


def test_thoughts_are_not_in_later_prompts():
    for session in sessions(generate("reasoning", 400, seed=2)):
        for before, after in pairwise(session):
            assert after.blocks[: len(before.blocks)] == before.blocks
    requests = generate("reasoning", 4000, seed=2)
    assert not any(request.answer for request in requests)
    assert max(request.output_tokens for request in requests) == 32_768
    assert mean(request.output_tokens for request in requests) > 2 * median(
        request.output_tokens for request in requests
    )


@pytest.mark.parametrize("name", ["conversations", "agents", "code"])
@pytest.mark.slow
def test_sessions_share_their_beginnings_and_nothing_else(name):
    owners = defaultdict(set)
    positions = defaultdict(set)
    for request in generate(name, 500, seed=1, block_tokens=16):
        for position, block in enumerate(request.blocks + request.answer):
            owners[block].add(request.session)
            positions[block].add(position)
    shared = {block for block, of in owners.items() if len(of) > 1}

    assert len(shared) > 100
    assert len(shared) < len(owners) / 2
    assert all(len(positions[block]) == 1 for block in shared)
    for request in generate(name, 500, seed=1, block_tokens=16):
        flags = [block in shared for block in request.blocks]
        assert flags == sorted(flags, reverse=True), "a shared block follows one that is not"


@pytest.mark.slow
def test_lengths_and_turns_are_those_of_the_sources():
    by_name = {name: generate(name, 6000, seed=5) for name in WORKLOADS}
    outputs = {name: median(request.output_tokens for request in made) for name, made in by_name.items()}

    assert 190 < outputs["agents"] < 250
    assert 12 <= outputs["code"] <= 14
    assert 24 < mean(request.output_tokens for request in by_name["code"]) < 32
    assert 400 < mean(request.output_tokens for request in by_name["conversations"]) < 480
    gaps = sorted(request.gap_s for session in sessions(by_name["agents"]) for request in session[1:])
    assert 1.4 < median(gaps) < 1.8
    assert 30 < gaps[round(0.9 * len(gaps))] < 55
    # Sessions under way at the end are cut, so only those of the first half count.
    halves = {
        name: [one for one in sessions(made) if one[0].at_s < made[-1].at_s / 2] for name, made in by_name.items()
    }
    for name, workload in WORKLOADS.items():
        assert mean(map(len, halves[name])) == pytest.approx(workload.turns, rel=0.15), name
    assert WORKLOADS["conversations"].turns == CHAT_TURNS_MEAN


def test_tenants_share_no_content_and_come_in_their_shares():
    requests = generate("tenants", 12_000, seed=1, per_s=2.0)
    counts = Counter(request.tenant for request in requests)
    owners = defaultdict(set)
    for request in requests:
        for block in request.blocks:
            owners[block].add(request.tenant)

    assert all(len(of) == 1 for of in owners.values())
    for tenant, (share, _variation) in TENANTS.items():
        assert counts[tenant] / len(requests) == pytest.approx(share, abs=0.1), tenant


def test_more_load_starts_sessions_faster_and_leaves_their_gaps():
    slow = generate("agents", 600, seed=1)
    fast = at_load(slow, 4.0)

    starts = {request.session: request.at_s for request in reversed(slow)}
    for session in sessions(fast):
        assert session[0].at_s == pytest.approx(starts[session[0].session] / 4)
    assert {request.gap_s for request in fast} <= {request.gap_s for request in slow}
    assert max(request.at_s for request in fast) <= slow[-1].at_s / 4
    open_loop = at_load(opened(slow), 4.0)
    assert [request.at_s for request in open_loop] == [request.at_s / 4 for request in slow]


SPLITS = {"both": Split(both=2), "apart": Split(prefill=1, decode=1)}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["conversations", "code", "tenants"])
def test_a_turn_is_sent_its_gap_after_the_answer_before_it(name, split):
    requests = [request for request in generate(name, 200, seed=1, per_s=2.0) if request.input_tokens < 30_000]
    outcomes = world(SPLITS[split], ROOMY).run(requests)

    assert [replayed.number for replayed in outcomes] == list(range(len(requests)))
    by_session = defaultdict(list)
    for replayed in outcomes:
        by_session[replayed.request.session].append(replayed)
    waited = 0
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.request.at_s == pytest.approx(before.finished_at + after.request.gap_s)
            waited += 1
    assert waited > 20
    assert all(replayed.finished_at > replayed.request.at_s for replayed in outcomes)


def test_an_open_loop_does_not_wait():
    requests = opened(generate("code", 60, seed=1, per_s=6.0))
    outcomes = with_baseline(world(Split(both=1), ROOMY), "random").run(requests)

    assert [replayed.request for replayed in outcomes] == requests


def test_a_session_goes_on_after_a_refused_turn():
    of = PolicyWorld(Split(both=1), ROOMY)
    of.targets = Targets(ttft_s=0.5)
    of.admit(AdmissionPolicy())
    requests = [request for request in generate("code", 300, seed=1, per_s=60.0) if request.input_tokens < 25_000]
    arrivals = []
    outcomes = of.run(requests, arrivals.append)

    refused = [replayed for replayed in outcomes if replayed.refused_at is not None]
    assert 5 < len(refused) < len(outcomes)
    assert arrivals == list(range(len(requests)))
    assert all((replayed.refused_at is None) != (replayed.finished_at is None) for replayed in outcomes)
    latest = {}
    for replayed in outcomes:
        before = latest.get(replayed.request.session)
        if before is not None:
            ended_at = before.finished_at if before.refused_at is None else before.refused_at
            assert replayed.request.at_s == pytest.approx(ended_at + replayed.request.gap_s)
        latest[replayed.request.session] = replayed


def test_the_next_turn_finds_the_answer_in_the_cache():
    first = Request(0.0, (1,), 900, 700, answer=(2, 3), session=1, gap_s=0.0)
    second = Request(0.0, (1, 2, 3, 4), 2100, 2, session=1, gap_s=1.0)
    one, two = with_baseline(world(Split(both=1)), "random").run([first, second])

    assert chains([second])[0][:3] == chains([first])[0]
    assert two.cached_tokens == 3 * BLOCK_TOKENS
    assert two.request.at_s == pytest.approx(one.finished_at + 1.0)
    assert two.ttft_s == pytest.approx(PROFILE.prompt_s(2100, two.cached_tokens) + 2 * NETWORK_S)
