"""Layers of groups with windows and states in vLLM's own memory: their planes, and reads between unequal ranks."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from connector.layout.engine_layout import RETAINED_BLOCKS, ModelHeads, groups_of, layers_of, regions_of, retain_answers
from connector.layout.routes import ReaderRank, routes_to, spans_of
from connector.layout.states import StateShape, planes_of_state
from connector.layout.tensors import UnsupportedLayout, why_not
from connector.messages import BlocksDigested, DigestBlocks, RankAggregation, Results
from connector.worker.digests import digested, read_cpu_memory
from shared.contracts.kv_exchange import KvGroup, KvGroupKind, KvHandshake, KvLayer, KvPlane, KvRank
from tests.support.kv_engines import Shape, handshake
from tests.support.vllm_releases import kv_cache_config_of

BLOCKS, TOKENS = 6, 32
KEY_HEADS, VALUE_HEADS, SIZE = 2, 4, 16
"""Of a tiny gated delta net, on all ranks."""
ROWS = 3


@pytest.fixture(autouse=True)
def installed() -> None:
    """vLLM is imported when the first test runs, not by every process that collects this file."""
    pytest.importorskip("vllm.v1.kv_cache_interface")


def gdn(ranks=1, **changes):
    """vLLM's specification of a gated delta net's state on one of ``ranks``."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(ranks, KEY_HEADS, VALUE_HEADS, SIZE, SIZE, ROWS + 1)
    given = {
        "block_size": TOKENS,
        "shapes": shapes,
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
        "mamba_cache_mode": "align",
        "page_size_padded": 64 * 1024,
    }
    return MambaSpec(**(given | changes))


def full(heads=4, **changes):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    given = {"block_size": TOKENS, "num_kv_heads": heads, "head_size": 64, "dtype": torch.float32}
    return FullAttentionSpec(**(given | changes))


def window(tokens=64, **changes):
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    given = {"block_size": TOKENS, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float32}
    return SlidingWindowSpec(sliding_window=tokens, **(given | changes))


def allocated(*groups):
    """Tensors and configuration as vLLM makes them for groups of (spec, number of layers): the n-th layers of all groups are
    the same memory.
    """
    import torch
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    cache = CacheConfig(block_size=TOKENS)
    cache.kv_cache_layout, cache.num_gpu_blocks_override = "LBHNC", BLOCKS
    engine = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None), cache_config=cache)
    made = [
        KVCacheGroupSpec([f"layers.{number}.{layer}" for layer in range(layers)], spec)
        for number, (spec, layers) in enumerate(groups)
    ]
    config = kv_cache_config_of(engine, made, 1 << 24)
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in caches.items():
        if name.startswith("layers.0"):
            tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    return caches, config


def rank_of(caches, config, rank=0, ranks=1, kv_heads=4, **heads) -> KvRank:
    layers = layers_of(caches, config, ModelHeads(kv_heads, ranks, **heads))
    return KvRank(rank=rank, agent=b"", device="cpu", device_id=0, layers=layers)


def engine(ranks: list[KvRank], config) -> KvHandshake:
    made = handshake(ranks, Shape(blocks=BLOCKS))
    return msgspec.structs.replace(made, groups=groups_of(config))


def test_groups_have_their_kind_block_size_and_window():
    _, config = allocated((full(), 2), (window(), 2), (gdn(), 2))

    assert groups_of(config) == [
        KvGroup(kind=KvGroupKind.FULL, block_size=TOKENS),
        KvGroup(kind=KvGroupKind.WINDOW, block_size=TOKENS, window=64),
        KvGroup(kind=KvGroupKind.STATE, block_size=TOKENS),
    ]


def test_a_window_that_only_the_computation_knows_is_full_attention():
    """As vLLM makes it where its hybrid manager is off."""
    _, config = allocated((full(sliding_window=64), 1))

    assert groups_of(config) == [KvGroup(kind=KvGroupKind.FULL, block_size=TOKENS)]


def test_a_window_is_as_long_as_vllm_keeps_it():
    _, config = allocated((window(extra_retained_tokens=3), 1))

    assert groups_of(config)[0].window == 67


def test_memory_shared_by_layers_of_several_groups_is_registered_once():
    caches, config = allocated((full(), 2), (window(), 2), (gdn(), 2))

    regions = regions_of(caches)

    assert sum(region.length for region in regions) == 2 * BLOCKS * full().page_size_bytes
    bases = {layer.name: layer.base for layer in rank_of(caches, config).layers}
    assert bases["layers.0.1"] == bases["layers.1.1"] == bases["layers.2.1"] != bases["layers.0.0"]


def test_of_a_state_only_the_content_is_read():
    caches, config = allocated((full(), 1), (gdn(), 1))
    state = gdn()

    layer = next(layer for layer in rank_of(caches, config).layers if layer.group == 1)

    assert layer.block_stride == state.page_size_bytes == full().page_size_bytes
    assert sum(plane.heads * plane.head_bytes for plane in layer.planes) == state.state_content_size_bytes
    assert state.state_content_size_bytes < state.page_size_bytes


def test_a_state_of_another_size_is_refused():
    caches, config = allocated((full(), 1), (gdn(), 1))
    caches["layers.1.0"] = caches["layers.1.0"][..., :-1]

    with pytest.raises(UnsupportedLayout, match=r"the state of layers\.1\.0 has shape"):
        rank_of(caches, config)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize(("holders", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_a_state_is_read_between_unequal_ranks(holders, readers, layout):
    """Each number is named by its projection and head, so a head that arrives in the wrong place shows."""
    held = [states(rank, holders, layout) for rank in range(holders)]
    peer = engine_of_states(held, holders, layout)
    for rank in range(readers):
        read = np.zeros_like(states(rank, readers, layout))
        own = rank_of_states(read, rank, readers, layout)
        for route in routes_to(ReaderRank(own, readers), peer):
            there, here = spans_of(route, [2], [4])
            for (source, length, _), (target, _, _) in zip(there.tolist(), here.tolist(), strict=True):
                ctypes.memmove(target, source, length)

        assert np.array_equal(read[4], states(rank, readers, layout)[2])
        assert not read[:4].any()
        assert not read[5:].any()


def states(rank: int, ranks: int, layout: str) -> np.ndarray:
    """Blocks of a gated delta net's state with 32-bit numbers, on one rank."""
    columns = [
        np.arange(heads)[rank * heads // ranks : (rank + 1) * heads // ranks, None] * SIZE
        + np.arange(SIZE)
        + 1000 * part
        for part, heads in enumerate((KEY_HEADS, KEY_HEADS, VALUE_HEADS), start=1)
    ]
    conv = np.concatenate([part.ravel() for part in columns]) + 10_000 * np.arange(ROWS)[:, None]
    heads = np.arange(VALUE_HEADS)[rank * VALUE_HEADS // ranks : (rank + 1) * VALUE_HEADS // ranks]
    matrix = 100_000 + heads[:, None] * SIZE * SIZE + np.arange(SIZE * SIZE)
    block = np.concatenate([(conv if layout == "SD" else conv.T).ravel(), matrix.ravel()])
    return np.array([block + 1_000_000 * number for number in range(BLOCKS)], dtype=np.uint32)


def rank_of_states(array: np.ndarray, rank: int, ranks: int, layout: str) -> KvRank:
    columns = (2 * KEY_HEADS + VALUE_HEADS) * SIZE // ranks
    state = StateShape(
        "GDN_ATTN",
        ((ROWS, columns) if layout == "SD" else (columns, ROWS), (VALUE_HEADS // ranks, SIZE, SIZE)),
        (4, 4),
        is_column_first=layout == "DS",
    )
    planes = planes_of_state(state, ranks, 0)
    layer = KvLayer(name="s", group=0, base=array.ctypes.data, block_stride=array.strides[0], planes=planes)
    return KvRank(rank=rank, agent=b"", device="cpu", device_id=0, layers=[layer])


def engine_of_states(arrays: list[np.ndarray], ranks: int, layout: str) -> KvHandshake:
    made = [rank_of_states(array, rank, ranks, layout) for rank, array in enumerate(arrays)]
    return handshake(made, Shape(blocks=BLOCKS, block_size=TOKENS))


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllms_parts_of_a_gated_delta_net_are_the_planes(ranks, monkeypatch):
    """As vLLM cuts them for its own connector, which has the layout DS only."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import ssm_conv_transfer_utils as theirs
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    mamba_utils.get_conv_state_layout.cache_clear()
    try:
        spec = gdn(ranks)
        split = theirs.derive_mamba_conv_split(spec, ranks)
    finally:
        monkeypatch.undo()
        mamba_utils.get_conv_state_layout.cache_clear()
    state = StateShape("GDN_ATTN", spec.shapes, (2, 4), is_column_first=True)

    *conv, matrix = planes_of_state(state, ranks, 0)

    assert [(plane.offset, plane.heads * plane.head_bytes) for plane in conv] == split.local_conv_offsets
    assert [plane.total for plane in conv] == [KEY_HEADS, KEY_HEADS, VALUE_HEADS]
    assert (matrix.offset, matrix.heads * matrix.head_bytes) == split.ssm_sizes
    assert matrix.total == VALUE_HEADS


def mamba2(ranks: int, groups: int) -> StateShape:
    """Eight heads of 32, states of 16, with ``groups`` of B and C in the whole model."""
    local = max(1, groups // ranks)
    return StateShape("MAMBA2", ((ROWS, 8 // ranks * 32 + 2 * local * 16), (8 // ranks, 32, 16)), (4, 4))


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (4, 1), (2, 4), (4, 4)])
def test_groups_of_mamba_2_are_cut_over_ranks_or_held_by_several(ranks, groups):
    planes = planes_of_state(mamba2(ranks, groups), ranks, groups)

    assert [plane.total for plane in planes] == [8, groups, groups] * ROWS + [8]
    assert [plane.heads for plane in planes[:3]] == [8 // ranks, max(1, groups // ranks), max(1, groups // ranks)]
    assert sum(plane.heads * plane.head_bytes for plane in planes) == mamba2(ranks, groups).content_bytes


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (mamba2(2, 1), 0),
        (mamba2(2, 4), 3),
        (StateShape("SHORT_CONV", ((2, 128),), (4,)), 0),
        (StateShape("GDN_ATTN", ((3, 96), (2, 16, 16), (2, 4)), (4, 4, 4)), 0),
    ],
)
def test_a_state_whose_parts_are_not_known_is_one_plane_of_its_rank(state, groups):
    assert planes_of_state(state, 2, groups) == [KvPlane(offset=0, head_bytes=state.content_bytes, heads=1, total=2)]


def test_a_state_that_every_rank_holds_is_one_head():
    state = StateShape("SHORT_CONV", ((2, 128),), (4,), is_replicated=True)

    assert planes_of_state(state, 4, 0) == [KvPlane(offset=0, head_bytes=1024, heads=1, total=1)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_mamba_1_is_cut_into_equal_parts(ranks):
    state = StateShape("MAMBA1", ((ROWS, 256 // ranks), (256 // ranks, 16)), (4, 4))

    planes = planes_of_state(state, ranks, 0)

    assert {(plane.total, plane.heads) for plane in planes} == {(64, 64 // ranks)}
    assert sum(plane.heads * plane.head_bytes for plane in planes) == state.content_bytes


def test_engines_whose_states_are_cut_differently_say_what_to_do():
    """An opaque state can be read between equal ranks only."""
    state = StateShape("SHORT_CONV", ((2, 128),), (4,))

    def one(ranks: int) -> KvHandshake:
        layers = [KvLayer(name="s", group=0, base=4096, block_stride=4096, planes=planes_of_state(state, ranks, 0))]
        made = [KvRank(rank=rank, agent=b"", device="cpu", device_id=0, layers=layers) for rank in range(ranks)]
        return handshake(made, Shape(blocks=BLOCKS))

    assert why_not(one(2), one(2)) == ""
    assert "the same --tensor-parallel-size" in why_not(one(1), one(2))


def test_engines_whose_boundaries_can_never_meet_say_what_to_do():
    _, config = allocated((full(), 1), (gdn(), 1))
    caches, other = allocated((full(block_size=64), 1), (gdn(block_size=64, page_size_padded=128 * 1024), 1))
    mine, theirs = (
        engine([rank_of(*allocated((full(), 1), (gdn(), 1)))], config),
        engine([rank_of(caches, other)], other),
    )

    assert "the same --block-size and --prefix-match-unit" in why_not(mine, theirs)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_equal_states_have_equal_digests_on_any_number_of_ranks(layout):
    """A head of one part is not that of another part with the same number, which another rank holds."""

    def digest(ranks: int, block: int, damage: int = 0) -> BlocksDigested:
        aggregation = RankAggregation(ranks)
        for rank in range(ranks):
            array = states(rank, ranks, layout)
            array[block, -1] += damage
            reader = ReaderRank(rank_of_states(array, rank, ranks, layout), ranks)
            joined = aggregation.add(Results(digested=[digested(DigestBlocks(1, [[block]]), reader, read_cpu_memory)]))
        return joined.digested[0]

    assert digest(2, 3).digest(0) == digest(1, 3).digest(0)
    assert not digest(2, 3).uneven
    assert digest(1, 3, damage=1).digest(0) != digest(1, 3).digest(0)


def test_an_engine_that_answers_keeps_all_windows_and_some_states():
    _, windows = allocated((full(), 1), (window(), 1))
    _, states_too = allocated((full(), 1), (window(), 1), (gdn(), 1))
    _, plain = allocated((full(), 1))
    for config in (windows, states_too, plain):
        config.prefix_cache_retention_interval = 0
        retain_answers(config)

    assert windows.prefix_cache_retention_interval is None
    assert states_too.prefix_cache_retention_interval == RETAINED_BLOCKS * TOKENS
    assert plain.prefix_cache_retention_interval == 0
