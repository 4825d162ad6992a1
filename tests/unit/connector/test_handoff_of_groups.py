"""Handoffs between two of vLLM's schedulers, of models with windows and states: each token is computed from right KV."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import pytest
from msgspec.structs import replace

from services.router.state.worker_speed import KvSizes
from shared.contracts.ids import LegId
from shared.contracts.kv_exchange import KvGroup, KvGroupKind, LegOrder
from tests.unit.connector.kv_groups import LAYOUTS
from tests.unit.connector.test_recomputes_beside_ready import SHARE, FixedShare
from tests.unit.connector.two_engines import Pair, Three, answer_of, whole_block

SEVERAL = [name for name in LAYOUTS if name != "full"]
ANSWER = 6


def prompt_of(tokens: int, salt: int = 0) -> list[int]:
    return [(7 * at + salt) % 97 for at in range(tokens)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def pair(folder):
    with ExitStack() as opened:

        def make(layout: str, *, depth: int = 2, **more: Any) -> Pair:
            return opened.enter_context(closing(Pair(folder, LAYOUTS[layout], depth=depth, **more)))

        yield make


def hand_over(pair: Pair, prompt: list[int], name: str = "r", order: LegOrder | None = None) -> None:
    """A prefill leg at ``p`` that ``d`` follows."""
    pair.p.order(name, prompt, 1, LegOrder(leg_id=LegId(name)))
    pair.d.order(name, prompt, ANSWER, order or pair.follow(name))


@pytest.mark.parametrize("depth", [1, 2], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_streamed_handoff_continues_as_one_engine_would(pair, layout, depth):
    for tokens in (130, 129, 128, 127, 97, 33, 32, 20):
        with closing(pair(layout, depth=depth)) as engines:
            check_a_streamed_handoff(engines, tokens)


def check_a_streamed_handoff(pair, tokens):
    prompt = prompt_of(tokens)
    hand_over(pair, prompt)
    pair.run()

    assert pair.d.answer("r")[: tokens + ANSWER] == answer_of(prompt, ANSWER)
    boundary = pair.d.plan.last_boundary(tokens)
    assert bool(pair.d.reads) == bool(boundary)
    assert pair.d.hit(answer_of(prompt, 1)) >= boundary, "it can be lent again"
    for engine in (pair.p, pair.d):
        assert engine.pool.get_num_free_blocks() == engine.free_at_first


def run_one(pair: Pair, prompt: list[int], name: str, order: LegOrder) -> None:
    """A request at ``d``, to its end."""
    pair.d.order(name, prompt, ANSWER, order)
    pair.run()
    assert pair.d.answer(name)[: len(prompt) + ANSWER] == answer_of(prompt, ANSWER)


def prefill(pair: Pair, prompt: list[int], name: str = "r", order: LegOrder | None = None) -> None:
    """A request at ``p``, to its end."""
    pair.p.order(name, prompt, 1, order or LegOrder())
    pair.run()


@pytest.mark.parametrize("tokens", [130, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_offer_is_taken_and_continues_as_one_engine_would(pair, layout, tokens):
    pair = pair(layout)
    prompt = prompt_of(tokens)
    prefill(pair, prompt, order=LegOrder(leg_id=LegId("r"), offer=True, offer_id="o"))
    offer = pair.p.offer()
    assert (offer.boundary if offer is not None else 0) == pair.d.plan.last_boundary(tokens)

    run_one(pair, prompt, "r", LegOrder(take=offer))

    assert sum(len(read.local_blocks) for read in pair.d.reads) == (blocks_of(pair, 0, offer.boundary) if offer else 0)
    assert pair.p.side.holder.counts.leases == 0


def blocks_of(pair: Pair, have: int, boundary: int) -> int:
    """Blocks of all groups that a boundary needs."""
    plan = pair.d.plan
    return sum(len(plan.needed(number, have, boundary)) for number in range(len(plan.groups)))


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_router_predicts_the_bytes_of_a_handoff(pair, layout, followed):
    """130 tokens: their last boundary is 128, where a block of each group ends."""
    pair = pair(layout)
    prompt = prompt_of(130)
    if followed:
        hand_over(pair, prompt)
        pair.run()
    else:
        prefill(pair, prompt)
        run_one(pair, prompt, "r", pair.by_hash())
    plan = pair.d.plan
    block_bytes = [(3 + number) * group.block_size for number, group in enumerate(plan.groups)]

    read = sum(len(read.local_blocks) * block_bytes[read.group] for read in pair.d.reads)

    assert read == KvSizes(*plan.sizes(block_bytes)).of(plan.last_boundary(130))


@pytest.mark.parametrize("own", [0, 100], ids=["", "and its answer"])
@pytest.mark.parametrize("layout", SEVERAL)
def test_full_attention_that_is_cached_beyond_the_other_groups_is_not_read_again(pair, layout, own):
    """Read-back of a conversation whose states and windows ``d`` has lost; ``own`` tokens of it, ``p`` does not have."""
    pair = pair(layout)
    prompt = prompt_of(200 + own)
    prefill(pair, prompt[:200])
    run_one(pair, prompt, "first", pair.by_hash())
    plan, pool = pair.d.plan, pair.d.pool
    boundary = plan.last_boundary(200)
    for block in pool.blocks:
        names = pool.cached_block_hashes_by_block.get(block.block_id, ()) or [block.block_hash]
        if block.block_hash is not None and all(
            name[32:] != number.to_bytes(4, "big") for name in names for number in plan.full
        ):
            pool._maybe_evict_cached_block(block)
    pair.d.reads.clear()

    run_one(pair, prompt, "again", pair.by_hash())

    read = sum(len(read.local_blocks) for read in pair.d.reads)
    have = (boundary - 1) // whole_block(LAYOUTS[layout]) * whole_block(LAYOUTS[layout]) if plan.full else 0
    assert read == blocks_of(pair, have, boundary)


@pytest.mark.parametrize("layout", ["full", "full and window", "state and window"])
def test_a_preempted_request_reads_again_what_it_loses_while_it_waits_for_memory(pair, layout):
    """At first all that holders have is still cached, and they have nothing more."""
    blocks = sum(most_held(group, 210) for group in LAYOUTS[layout].groups)
    pair = pair(layout, retention=None if layout != "full" else 0, blocks=1 + 2 * blocks + 1)
    answers = {"first": 200, "second": 90}
    prompts = {name: prompt_of(200, number) for number, name in enumerate(answers)}
    offers = {}
    for name, prompt in prompts.items():
        prefill(pair, prompt, name, LegOrder(leg_id=LegId(name), offer=True, offer_id=name))
        offers[name] = pair.p.offer()
    for name, prompt in prompts.items():
        pair.d.order(name, prompt, answers[name], replace(pair.by_hash(), take=offers[name]))
    reports = {}

    def is_over() -> bool:
        alive = pair.d.scheduler.requests
        reports.update((name, pair.d.side.reader.transfer_report(name)) for name in alive)
        return not alive

    pair.run(until=is_over)

    preempted = [report for report in reports.values() if report.preemptions]
    assert preempted
    for report in preempted:
        assert report.refetched_tokens
        assert report.reprefilled_tokens <= 200
    for name, prompt in prompts.items():
        assert pair.d.answer(name)[: 200 + answers[name]] == answer_of(prompt, answers[name])


def most_held(group: KvGroup, tokens: int) -> int:
    """Blocks of a group that a request of so many tokens has at most, between two steps."""
    whole = -(-tokens // group.block_size)
    return {KvGroupKind.FULL: whole, KvGroupKind.STATE: 1}.get(group.kind) or -(-group.window // group.block_size) + 1


@pytest.mark.parametrize("failing", ["first group", "last group", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_holder_that_ends_during_a_read_costs_a_second_read_or_the_prompt_and_no_token(pair, layout, failing):
    pair = pair(layout)
    prompt = prompt_of(150)
    last = len(LAYOUTS[layout].groups) - 1
    group = {"first group": 0, "last group": last, "all": None}[failing]
    broken = []

    def fails(read) -> bool:
        is_hit = (group is None or read.group == group) and len(broken) < (2 if group is not None else 99)
        if is_hit:
            broken.append(read)
        return is_hit

    pair.fails = fails
    hand_over(pair, prompt)
    pair.run()

    assert broken
    assert pair.d.answer("r")[: 150 + ANSWER] == answer_of(prompt, ANSWER)
    for engine in (pair.p, pair.d):
        assert engine.pool.get_num_free_blocks() == engine.free_at_first


@pytest.mark.parametrize("others", ["a second source", "none"])
@pytest.mark.parametrize("layout", SEVERAL)
def test_what_a_holder_that_dies_has_not_sent_comes_from_a_second_source_or_is_computed(folder, layout, others):
    """It dies while what the boundary needs besides full attention is read."""
    with closing(Three(folder, LAYOUTS[layout], depth=2)) as three:
        prompt = prompt_of(150)
        for engine in (three.p, three.q):
            engine.order(f"at-{engine.name}", prompt, 1, LegOrder())
        three.run()
        broken = []

        def fails(read) -> bool:
            """Reads from ``p``, whose engine ends meanwhile, and from ``q`` if nobody else shall be left."""
            is_last = read.group not in three.d.plan.full
            if not is_last or (read.peer[0] == three.q.name and others != "none"):
                return False
            broken.append(read.peer[0])
            return True

        three.fails = fails
        three.d.order("r", prompt, ANSWER, three.by_hash())
        three.run(until=lambda: bool(broken))
        three.die(three.p)
        three.run()

        assert three.d.answer("r")[: 150 + ANSWER] == answer_of(prompt, ANSWER)
        boundary = three.d.plan.last_boundary(150)
        computed = sum(step.get("r", 0) for step in three.d.steps)
        assert {read.peer[0] for read in three.d.reads} == {three.p.name, three.q.name}
        assert (computed <= 150 - boundary + ANSWER) == (others != "none")
        for engine in (three.d, three.q):
            assert engine.pool.get_num_free_blocks() == engine.free_at_first


@pytest.mark.parametrize("layout", SEVERAL)
def test_full_attention_that_arrived_before_a_failure_is_cached(pair, layout):
    pair = pair(layout)
    plan = pair.d.plan
    if not plan.full:
        pytest.skip("it has no full attention")
    prompt = prompt_of(150)
    prefill(pair, prompt)
    pair.fails = lambda read: read.group not in plan.full
    run_one(pair, prompt, "r", pair.by_hash())

    full = [read for read in pair.d.reads if read.group == plan.full[0]]
    assert len(full[0].local_blocks) > 1
    assert all(len(read.local_blocks) <= 1 + plan.alignment // plan.stride for read in full[1:]), "the rest is here"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_requests_and_turns_continue_as_one_engine_would(pair, layout):
    pair = pair(layout, retention=None if len(LAYOUTS[layout].groups) > 1 else 0, blocks=200)
    prompts = {f"r{number}": prompt_of(90 + 37 * number, number % 2) for number in range(4)}
    for name, prompt in prompts.items():
        hand_over(pair, prompt, name)
    pair.run()
    for name, prompt in prompts.items():
        assert pair.d.answer(name)[: len(prompt) + ANSWER] == answer_of(prompt, ANSWER)
        longer = [*answer_of(prompt, ANSWER), *prompt_of(60, 5)]
        hand_over(pair, longer, f"{name}+")
        pair.run()
        assert pair.d.answer(f"{name}+")[: len(longer) + ANSWER] == answer_of(longer, ANSWER)
    for engine in (pair.p, pair.d):
        assert engine.pool.get_num_free_blocks() == engine.free_at_first


@pytest.mark.parametrize("layout", ["states", "states and half a block", "state and window"])
def test_a_recompute_in_small_parts_leaves_right_states_in_the_cache(pair, layout):
    pair = pair(layout, retention=None, blocks=200)
    pair.d.side.share = FixedShare()
    pair.d.order("ready", prompt_of(10), 150, LegOrder())
    pair.run(until=lambda: bool(pair.d.steps and "ready" in pair.d.running))
    prompt = prompt_of(200)
    pair.d.order("lost", prompt, ANSWER, LegOrder(recomputes=True))
    pair.run()

    parts = [step["lost"] for step in pair.d.steps if step.get("lost", 1) > 1]
    assert max(parts) <= SHARE
    assert sum(parts) >= 199
    assert pair.d.answer("lost")[: 200 + ANSWER] == answer_of(prompt, ANSWER)
    for tokens in (200, 150, 120):
        run_one(pair, prompt[:tokens], f"again-{tokens}", LegOrder())
        assert pair.d.steps[-ANSWER][f"again-{tokens}"] == 1


@pytest.mark.parametrize("spare", range(3, 12))
def test_an_answer_begins_before_its_kv_is_there_only_with_a_block_for_the_token_in_each_group(pair, spare):
    pair = pair("states")
    prompt = prompt_of(128)
    prefill(pair, prompt, order=LegOrder(leg_id=LegId("r"), offer=True, offer_id="o"))
    offer = pair.p.offer()
    scheduler, pool = pair.d.scheduler, pair.d.pool
    others = pool.get_new_blocks(pool.get_num_free_blocks() - blocks_of(pair, 0, 96) - spare)
    pair.d.order("r", prompt, ANSWER, LegOrder(take=offer))
    pair.d.schedule()
    pair.d.compute()
    free = pool.get_num_free_blocks() - scheduler._inflight_prefill_reserved_blocks()
    if scheduler.requests["r"].num_computed_tokens:
        begins = scheduler.requests["r"].num_tokens == 129
        free += begins  # A block of full attention is set aside for the token since.
        assert begins == (free >= 4), "each of four groups ends a block with the prompt"
    pool.free_blocks(others)
    pair.run()
    assert pair.d.answer("r")[: 128 + ANSWER] == answer_of(prompt, ANSWER)
