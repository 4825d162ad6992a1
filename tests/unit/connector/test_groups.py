"""What a request needs at a boundary is what vLLM's own managers keep and allocate for it."""

from __future__ import annotations

from hashlib import sha256
from math import lcm
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.groups import GroupPlan
from shared.contracts.kv_exchange import GroupBlocks, KvGroup, KvGroupKind, pack_block_ids
from tests.support.examples import examples
from tests.unit.connector.kv_groups import LAYOUTS, SEVERAL, cache_config_of, manager_of, plan_of

TOKENS_MAX = 400
BLOCKS = 400


def positions(plan: GroupPlan, layout, data, *, before: int = TOKENS_MAX) -> tuple[int, int]:
    """How far full attention is cached, and a later boundary."""
    boundary = data.draw(st.integers(1, before // plan.alignment)) * plan.alignment
    steps = (boundary - 1) // layout.block_size if plan.full else 0
    return data.draw(st.integers(0, steps)) * layout.block_size, boundary


@pytest.mark.parametrize("name", SEVERAL)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_the_needed_blocks_are_those_that_vllm_allocates_for_a_fetch(name, data):
    layout = LAYOUTS[name]
    manager = manager_of(layout, BLOCKS)
    plan = plan_of(manager.kv_cache_config)
    have, boundary = positions(plan, layout, data)
    cached = [
        manager.block_pool.get_new_blocks(have // size) if number in plan.full else []
        for number, size in enumerate(group.block_size for group in layout.groups)
    ]

    manager.coordinator.allocate_new_computed_blocks("r", tuple(cached), have, boundary - have)

    for number, table in enumerate(manager.coordinator.get_blocks("r")):
        read = [index for index, block in enumerate(table) if not block.is_null and block not in cached[number]]
        assert read == list(plan.needed(number, have, boundary)), number


@pytest.mark.parametrize("name", SEVERAL)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_a_prompt_whose_needed_blocks_are_cached_is_a_hit_at_the_boundary_and_with_one_less_it_is_none(name, data):
    """Otherwise the reader would read too little, or more than vLLM needs."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    layout = LAYOUTS[name]
    manager = manager_of(layout, BLOCKS)
    plan, pool = plan_of(manager.kv_cache_config), manager.block_pool
    _have, boundary = positions(plan, layout, data)
    hashes = [sha256(bytes([at])).digest() for at in range(boundary // plan.unit)]
    needed = [(number, index) for number in range(len(layout.groups)) for index in plan.needed(number, 0, boundary)]
    left_out = data.draw(st.sampled_from([None, *needed]))
    for number, index in needed:
        if (number, index) != left_out:
            name_of = BlockHash(plan.name_of(hashes, number, index, boundary))
            (block,) = pool.get_new_blocks(1)
            pool._insert_block_hash(make_block_hash_with_group_id(name_of, number), block, num_tokens=None)

    _blocks, hit, _uncached = manager.coordinator.find_longest_cache_hit(hashes, boundary)

    assert (hit == boundary) == (left_out is None), (hit, left_out)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_the_sizes_predict_the_bytes_that_are_read(name, data):
    """Exactly where a block of each group ends behind the widest window; elsewhere at most one block of each more, and
    never less than what is read of a shorter prefix.
    """
    layout = LAYOUTS[name]
    plan = plan_of(cache_config_of(layout, 9))
    have, boundary = positions(plan, layout, data, before=10 * TOKENS_MAX)
    block_bytes = [
        data.draw(st.integers(0, 1000)) * group.block_size if number in plan.full else data.draw(st.integers(0, 10**6))
        for number, group in enumerate(plan.groups)
    ]
    token, others = plan.sizes(block_bytes)

    needed = [len(plan.needed(number, have, boundary)) for number in range(len(plan.groups))]
    read = sum(map(mul, needed, block_bytes))
    predicted = token * (boundary - have) + others

    widest = max(group.window for group in plan.groups)
    if boundary > widest and boundary % lcm(*(group.block_size for group in plan.groups)) == 0:
        assert predicted == read
    elif boundary > widest:
        assert abs(predicted - read) <= sum(block_bytes)
    else:
        assert predicted + sum(block_bytes) >= read


@pytest.mark.parametrize("name", LAYOUTS)
@given(tokens=st.integers(1, TOKENS_MAX))
@settings(max_examples=examples(40))
def test_the_last_boundary_leaves_a_token_and_less_than_an_alignment_to_compute(name, tokens):
    from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

    config = cache_config_of(LAYOUTS[name], 9)
    plan = plan_of(config)
    if plan.keeps_prefix:
        assert plan.last_boundary(tokens) == tokens // 16 * 16
        return
    for drafts in (False, True):
        ours = GroupPlan(plan.groups, plan.unit, plan.alignment, beyond=plan.alignment * drafts)
        last = ours.last_boundary(tokens)
        assert last == get_mamba_prefill_checkpoint_position(tokens, plan.alignment, drafts) < tokens


STATES = [KvGroup(kind=KvGroupKind.STATE, block_size=64), KvGroup(kind=KvGroupKind.FULL, block_size=64)]
WINDOW = KvGroup(kind=KvGroupKind.WINDOW, block_size=32, window=50)
PLAN = GroupPlan([*STATES, WINDOW], 32, 32)


def offered(**wrong):
    """The groups of a grant from 64 tokens on to the boundary 160, with some of them replaced."""
    groups = {"state": (2, [7]), "full": (1, [4, 5]), "window": (3, [8, 9])} | wrong
    return [GroupBlocks(first=first, block_ids=pack_block_ids(ids)) for first, ids in groups.values()]


def test_a_grant_with_what_each_group_needs_is_taken():
    blocks, end = PLAN.granted(offered(), 64, 160)

    assert [(one.group, one.first, one.ids) for one in blocks] == [(0, 2, [7]), (1, 1, [4, 5]), (2, 3, [8, 9])]
    assert end == 160


@pytest.mark.parametrize(
    ("groups", "boundary"),
    [
        (offered()[:2], 160),
        (offered() + offered(), 160),
        (offered(state=(1, [7])), 160),
        (offered(state=(2, [])), 160),
        (offered(state=(2, [7, 7])), 160),
        (offered(full=(0, [3, 4, 5])), 160),
        (offered(full=(1, [4])), 160),
        (offered(full=(1, [4, 5, 6])), 160),
        (offered(full=(1 << 24, [4, 5])), 160),
        (offered(window=(4, [9])), 160),
        (offered(window=(2, [7, 8, 9])), 160),
        (offered(window=(3, [8])), 160),
        (offered(), 161),
        (offered(), 128),
        (offered(), 192),
        (offered(), 0),
    ],
    ids=str,
)
def test_a_grant_with_less_more_or_other_blocks_is_refused(groups, boundary):
    assert PLAN.granted(groups, 64, boundary) is None


def test_a_grant_of_a_followed_prompt_has_whole_blocks_of_full_attention_only():
    chunk = offered(state=(0, []), full=(1, [4, 5]), window=(0, []))
    blocks, end = PLAN.granted(chunk, 64, 0)

    assert ([one.ids for one in blocks], end) == ([[], [4, 5], []], 192)
    assert PLAN.granted(offered(full=(2, [4, 5]), state=(0, []), window=(0, [])), 64, 0) is None
    assert PLAN.granted(offered(window=(0, [])), 64, 0) is None, "a state comes with a boundary only"


def test_hashes_begin_where_a_window_may_and_at_a_block_of_each_group():
    assert PLAN.hashes_from(0) == 0
    assert PLAN.hashes_from(128) == 64 // 32
    assert PLAN.hashes_from(192) == 128 // 32
    states = GroupPlan(STATES, 32, 32)
    assert states.hashes_from(128) == 64 // 32, "the hash of the state at 128"
    assert states.hashes_from(160) == 128 // 32
