"""Which cache tensors have readable heads, and in what two engines must agree."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from connector.layout.tensors import CacheTensor, UnsupportedLayout, layer_of, why_not
from shared.contracts.kv_exchange import GROUP, KvPlane
from tests.support.kv_engines import RankMemory, Shape, handshake, memories
from tests.unit.connector.real_scheduler import full, window


def tensor(array: np.ndarray, dims: str) -> CacheTensor:
    return CacheTensor("layers.0", GROUP, array.ctypes.data, dims, array.shape, array.strides, array.itemsize)


def test_a_block_of_the_cpu_engine_is_one_plane_of_heads():
    array = np.zeros((10, 4, 32, 128), dtype=np.float32)  # blocks, heads, tokens, keys and values of a token

    layer = layer_of(tensor(array, "BHNC"), blocks=10, kv_heads=4)

    assert layer.block_stride == 4 * 32 * 128 * 4
    assert layer.planes == [KvPlane(offset=0, head_bytes=32 * 128 * 4, heads=4, total=4)]


def test_separate_keys_and_values_are_two_planes():
    array = np.zeros((2, 10, 4, 16, 64), dtype=np.float16)

    layer = layer_of(tensor(array, "KBHNC"), blocks=10, kv_heads=4)

    assert [plane.offset for plane in layer.planes] == [0, array.strides[0]]
    assert layer.block_stride == array.strides[1]


def test_a_block_of_several_kernel_blocks_has_a_plane_for_each():
    array = np.zeros((40, 4, 16, 128), dtype=np.float16)

    layer = layer_of(tensor(array, "BHNC"), blocks=10, kv_heads=4)

    assert [plane.offset for plane in layer.planes] == [piece * array.strides[0] for piece in range(4)]
    assert layer.block_stride == 4 * array.strides[0]


def test_a_latent_cache_is_one_head():
    layer = layer_of(tensor(np.zeros((10, 64, 576), dtype=np.float16), "BNC"), blocks=10, kv_heads=1)

    assert layer.planes == [KvPlane(offset=0, head_bytes=64 * 576 * 2, heads=1, total=1)]


def test_layers_interleaved_in_a_block_are_separate_layers():
    array = np.zeros((10, 3, 4, 16, 128), dtype=np.float16)  # blocks outermost, then layers

    layer = layer_of(tensor(array[:, 1], "BHNC"), blocks=10, kv_heads=4)

    assert layer.block_stride == array.strides[0]
    assert layer.base == array.ctypes.data + array.strides[1]


def test_tokens_outside_heads_are_refused_with_a_remedy():
    array = np.zeros((10, 16, 4, 128), dtype=np.float16).transpose(0, 2, 1, 3)

    with pytest.raises(UnsupportedLayout, match="VLLM_KV_CACHE_LAYOUT"):
        layer_of(tensor(array, "BHNC"), blocks=10, kv_heads=4)


def test_a_tensor_of_too_few_blocks_is_refused():
    with pytest.raises(UnsupportedLayout, match="has 9 blocks"):
        layer_of(tensor(np.zeros((9, 4, 16, 128)), "BHNC"), blocks=10, kv_heads=4)


def described(shape: Shape):
    return handshake([memory.described() for memory in memories(shape)], shape)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_engines_may_differ_in_ranks_stages_and_blocks(ranks, cut):
    assert why_not(described(Shape()), described(Shape(ranks=ranks, cut=cut, blocks=20))) == ""
    assert why_not(described(Shape(ranks=ranks, cut=cut, blocks=20)), described(Shape())) == ""


def test_one_rank_may_have_the_layers_of_its_stage_only():
    shape = Shape(cut=1)
    first = handshake([RankMemory(shape, 0, 0).described()], shape)

    assert why_not(first, described(Shape()), is_whole=False) == ""
    assert why_not(first, described(Shape())) == "layers differ: 1 here, 3 there"


def test_a_layer_in_two_stages_is_refused():
    peer = described(Shape(cut=1))
    again = msgspec.structs.replace(peer.ranks[1], layers=[*peer.ranks[1].layers, *peer.ranks[0].layers])

    refusal = why_not(described(Shape()), msgspec.structs.replace(peer, ranks=[peer.ranks[0], again]))

    assert refusal == "layer layers.0 is in two stages"


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [2, 3, 0, 1], [0, 1, 2], [2, 3]])
def test_stages_whose_ranks_are_incomplete_or_mixed_are_refused(order):
    peer = described(Shape(cut=1, ranks=2))

    refusal = why_not(described(Shape()), msgspec.structs.replace(peer, ranks=[peer.ranks[one] for one in order]))

    assert "not all of each stage in their order" in refusal


@pytest.mark.parametrize(
    ("field", "value"), [("version", 1), ("fingerprint", "another"), ("hash_block_size", 64), ("groups", [])]
)
def test_the_incompatible_field_is_named(field, value):
    peer = msgspec.structs.replace(described(Shape()), **{field: value})

    assert why_not(described(Shape()), peer).startswith(f"{field} differs")


TWO_GROUPS = "full in blocks of 16 tokens, window in blocks of {} tokens (of 128)"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hash_block_size": 96}, "hash_block_size differs: 16 here, 96 there"),
        ({"alignment": 32}, "alignment differs: 16 here, 32 there"),
        (
            {"groups": [full(16), window(32, 128)]},
            f"groups differs: {TWO_GROUPS.format(16)} here, {TWO_GROUPS.format(32)} there",
        ),
    ],
    ids=["unit", "alignment", "block sizes"],
)
def test_boundaries_that_never_meet_are_refused_with_both_values_and_the_settings(fields, why):
    own = msgspec.structs.replace(
        described(Shape()), hash_block_size=16, alignment=16, groups=[full(16), window(16, 128)]
    )

    refusal = why_not(own, msgspec.structs.replace(own, **fields))

    assert refusal == f"{why}; give both engines the same --block-size and --prefix-match-unit"


def test_other_layers_are_named():
    assert why_not(described(Shape(layers=2)), described(Shape(layers=3))) == "layers differ: 2 here, 3 there"


def test_layers_of_other_names_are_named():
    assert why_not(described(Shape()), described(Shape(first_layer=1))) == "layers differ: layers.0 is not there"


def test_two_layers_of_one_name_are_refused():
    peer = described(Shape())
    twice = msgspec.structs.replace(peer.ranks[0], layers=[peer.ranks[0].layers[0]] * 3)

    assert "two layers of one name" in why_not(described(Shape()), msgspec.structs.replace(peer, ranks=[twice]))


def test_other_heads_in_a_layer_are_named():
    assert "layer layers.0 differs" in why_not(described(Shape()), described(Shape(content=32)))


def test_engines_with_different_planes_do_not_exchange():
    assert "layer layers.0 differs" in why_not(described(Shape()), described(Shape(dims="KBHNC")))


def test_a_handshake_that_lacks_a_rank_is_refused():
    peer = described(Shape(ranks=2))
    half = msgspec.structs.replace(peer, ranks=[peer.ranks[1]])

    assert "(stage, rank) of the ranks are [(0, 1)]" in why_not(described(Shape()), half)


def test_a_handshake_with_wrong_heads_is_refused():
    peer = described(Shape(ranks=2))
    alone = msgspec.structs.replace(peer, ranks=[peer.ranks[0]])

    assert "does not hold 4 of 4 KV heads" in why_not(described(Shape()), alone)
