"""Engines over several GPUs: tensor and pipeline parallel, and data parallel groups."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace

import pytest

from replay.capacity.fleet_file import fleet_toml
from replay.capacity.layouts import SHAPES, Layout, LayoutError, exchange_s, laid_out, layout_of, layouts_of
from replay.capacity.search import alike, first_splits, neighbours
from replay.profile import PROFILES, Profile
from replay.router import NETWORK_S
from replay.split import Split
from replay.traces import Request
from replay.world import World
from services.launcher.fleet.fleet_file import part_of, read_fleet_file
from shared.contracts.workers import Role

CHUNK = 2048
NOTHING_ELSE = replace(PROFILES["8b"], prefill_base_s=0.0, prefill_s_per_pair=0.0)


def of(name: str, layout: str) -> Profile:
    return laid_out(PROFILES[name], SHAPES[name], layout_of(layout))


# Memory.


@pytest.mark.parametrize("name", PROFILES)
def test_in_its_own_layout_an_engine_is_the_profiles(name):
    found = laid_out(PROFILES[name], SHAPES[name], Layout(tensor=SHAPES[name].gpus))

    rate = PROFILES[name].prefill_tokens_per_s
    assert found.prefill_tokens_per_s == pytest.approx(rate)
    assert replace(found, prefill_tokens_per_s=rate) == PROFILES[name]


def test_stages_divide_weights_and_kv():
    """72 GB of each GPU; 35 GB of weights and 29.36 GB of KV on four leave 7.64 GB. On eight GPUs there are 17.5 GB of
    weights, so 46.86 GB for blocks of 512 x 320 KiB / 8 = 20.97 MB.
    """
    assert of("70b", "TP4xPP2").kv_blocks == of("70b", "TP8").kv_blocks == 2234


def test_more_ranks_than_kv_heads_keep_copies_of_them():
    """Of 2 heads each of 4 ranks keeps one, as each of 2 does."""
    two, four = of("80b-a3b", "TP2xPP2"), of("80b-a3b", "TP4")

    assert four.kv_blocks == pytest.approx(two.kv_blocks / 2, rel=1e-3)


def test_data_parallel_ranks_share_out_the_experts_alone():
    """2.7 GB of other weights and a quarter of 77.3 GB of experts; 3.99 GB beside, as with two GPUs; so 45.98 GB for
    blocks of 12.58 MB on each of four ranks.
    """
    assert of("80b-a3b", "DP4").kv_blocks == 4 * 3653


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("70b", "TP1", "140 GB of weights"),
        ("80b-a3b", "TP1", "80 GB of weights"),
        ("8b", "PP64", "32 layers"),
        ("8b", "DP2", "no experts"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(name, layout, says):
    with pytest.raises(LayoutError, match=says):
        of(name, layout)


@pytest.mark.parametrize("text", ["", "4", "TP", "TP0", "TP4xTP2", "TP4yPP2", "EP4", "TP64xPP64"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(LayoutError):
        layout_of(text)


def test_the_layout_of_a_role_counts_before_that_of_all():
    found = layouts_of(["decode=tp1 x dp8", "TP4xPP2"], Layout(tensor=2))

    assert found == {"prefill": Layout(4, 2), "decode": Layout(1, 1, 8), "both": Layout(4, 2)}


# Times.


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (2, 5), (4, 8), (4, 3)])
def test_a_prompt_pays_for_the_bubble_once(stages, chunks):
    """The fraction of time that stages idle is (p - 1) / (m + p - 1)."""
    whole_s = NOTHING_ELSE.prompt_s(chunks * CHUNK, 0)
    found_s = replace(NOTHING_ELSE, stages=stages).prompt_s(chunks * CHUNK, 0)

    bubble = (stages - 1) / (chunks + stages - 1)
    assert found_s * (1 - bubble) == pytest.approx(whole_s / stages)


@pytest.mark.parametrize(
    ("name", "layout"), [("8b", "TP2xPP2"), ("70b", "TP2xPP4"), ("80b-a3b", "DP4"), ("80b-a3b", "TP2xPP2xDP2")]
)
@pytest.mark.parametrize("tokens", [500, 2048, 5000, 30_000])
def test_a_simulated_prompt_takes_what_the_formula_says(name, layout, tokens):
    profile = replace(of(name, layout), groups="full")
    (outcome,) = World(Split(both=1), profile).run([Request(0.0, (), tokens, 1)])

    assert outcome.ttft_s == pytest.approx(2 * NETWORK_S + profile.prompt_s(tokens, 0))


def test_two_stages_compute_many_prompts_twice_as_fast_as_one():
    requests = [Request(0.0, (), 4 * CHUNK, 1) for _ in range(32)]
    base = replace(NOTHING_ELSE, kv_blocks=4000)
    last_s = {
        stages: max(one.ttft_s for one in World(Split(both=1), replace(base, stages=stages)).run(requests))
        for stages in (1, 2)
    }

    assert last_s[1] / last_s[2] == pytest.approx(2.0, rel=0.02)


def test_stages_and_ranks_share_out_what_decodes():
    one = PROFILES["8b"]
    two = replace(one, stages=2)

    assert two.decode_s(32, 32_000) == one.decode_s(16, 16_000)
    assert two.decode_s(1, 1000) == one.decode_s(1, 1000)
    assert replace(one, data_ranks=4).decode_s(30, 30_000) == pytest.approx(one.decode_s(8, 8_000))


def test_a_step_with_answers_is_no_shorter_than_all_stages():
    """A batch with a chunk and one of answers: the answers' next token comes when the chunk has passed both stages."""
    two = replace(PROFILES["8b"], stages=2)

    assert two.step_s(CHUNK, 0.0, 8, 8000, follows=True) == two.step_s(CHUNK, 0.0, 8, 8000)
    assert two.step_s(CHUNK, 0.0, 8, 8000) > two.step_s(CHUNK, 0.0, 0, 0)


def test_exchanges_take_their_bytes_over_the_link():
    """Hidden states of 16 KiB. TP 4: 2 x 80 all-reduces that send 1.5 times the bytes at 360 GB/s, 10 us each. PP 2: two
    tensors once, over the network where the engine has more GPUs than a host.
    """
    shape = SHAPES["70b"]
    assert exchange_s(shape, Layout(tensor=4)) == pytest.approx((1.6e-3, 160 * 16_384 * 1.5 / 360e9))
    assert exchange_s(shape, Layout(pipeline=2)) == pytest.approx((1e-5, 2 * 16_384 / 360e9))
    tensor_s, each_s = exchange_s(shape, Layout(tensor=8))
    over_hosts = exchange_s(shape, Layout(tensor=8, pipeline=2))
    assert over_hosts == pytest.approx((tensor_s + 1e-5, each_s + 2 * 16_384 / 25e9))
    experts = SHAPES["80b-a3b"]
    assert exchange_s(experts, Layout(data=4)) == pytest.approx((0.96e-3, 96 * 4096 * 3 / 360e9))
    assert exchange_s(experts, Layout(data=16)) == pytest.approx((0.96e-3, 96 * 4096 / 25e9))


# Fleets.


@pytest.mark.parametrize("cost", [Split(1, 1, 1), Split(4, 1, 1), Split(2, 1, 4), Split(1, 8, 1)], ids=str)
@pytest.mark.parametrize("size", [8, 9, 24])
def test_splits_that_are_tried_use_the_gpus_and_no_more(cost, size):
    first = first_splits(size, cost)
    for one in first:
        assert all(max(map(operator.sub, near.counts, one.counts)) > 0 for near in neighbours(one, 1, size, cost))
    splits = {*first, *itertools.chain.from_iterable(neighbours(one, 2, size, cost) for one in first)}
    splits |= {*itertools.chain.from_iterable(alike(size, one, cost) for one in first)}

    assert len(splits) > 1
    for split in splits:
        assert size - max(cost.counts) < split.times(cost) <= size


LAYOUTS = {
    "one GPU": (Split(1, 3, 2), "TP1", "TP1"),
    "different": (Split(3, 2), "TP4xPP2", "TP2"),
    "a group": (Split(2, 1), "TP2", "TP1xDP4"),
    "over hosts": (Split(2, 1, 1), "TP8xPP2", "TP4xPP3"),
    "a group over hosts": (Split(1, 2, 0), "TP8", "TP2xDP12"),
}


@pytest.mark.parametrize("of_plan", LAYOUTS.values(), ids=LAYOUTS)
def test_the_file_of_a_fleet_starts_it(of_plan):
    split, prefill, decode = of_plan
    layouts = {"prefill": layout_of(prefill), "decode": layout_of(decode), "both": layout_of("TP1")}

    fleet = read_fleet_file(fleet_toml(split, layouts))

    found: dict[str, int] = {}
    for host in fleet.host:
        part = part_of(fleet, host.name)
        used = 0
        for model in part.models:
            assert ("--enable-expert-parallel" in model.engine_args) == ("DP" in prefill + decode)
            for role in dict.fromkeys(model.roles):
                layout = layouts[role.value]
                count = {Role.PREFILL: model.prefill, Role.DECODE: model.decode, Role.BOTH: model.both}[role]
                assert (model.stages_of(role), model.group_of(role)) == (layout.pipeline, layout.data)
                assert model.gpus_of(role) * model.hosts_of(role) == layout.tensor * layout.pipeline
                used += count * model.gpus_of(role) * model.group_here(role)
                if role not in model.spans or not model.spans[role].node:
                    found[role.value] = found.get(role.value, 0) + count
        assert used <= 8
    assert found == {role: count for role, count in zip(layouts, split.counts, strict=True) if count}
