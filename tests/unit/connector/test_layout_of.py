"""The layout read from vLLM's KV caches, and which engines are refused with what reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.layout.engine_layout import dims_of, layers_of, refuse_unsupported, regions_of, required_layout
from connector.layout.tensors import UnsupportedLayout

BLOCKS, LAYERS, HEADS, TOKENS, SIZE = 6, 3, 4, 32, 8


@pytest.fixture(autouse=True)
def installed() -> None:
    """vLLM is imported when the first test runs, not by every process that collects this file."""
    pytest.importorskip("vllm.v1.kv_cache_interface")


def spec_of(kind, **values):
    """A KV cache specification of vLLM's, by the name of its class."""
    import torch
    from vllm.v1 import kv_cache_interface

    values = {"dtype": torch.float32} | values
    return getattr(kv_cache_interface, f"{kind}Spec")(**values)


def attention(**changes):
    values = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE} | changes
    return spec_of("FullAttention", **values)


def latent():
    return spec_of("MLAAttention", block_size=TOKENS, num_kv_heads=1, head_size=SIZE)


def mamba():
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))


def quantised():
    from vllm.v1.kv_cache_interface import KVQuantMode

    return attention(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


def cache_of(spec, layout_name="LBHNC", kernel_block_size=None):
    """Tensors and configuration as vLLM's worker creates them."""
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[layout_name]
    page = spec.page_size_bytes
    names = [f"model.layers.{number}.attn" for number in (0, 10, 2)[:LAYERS]]
    compact = layout.is_layer_compact
    placed = interface.KVCacheTensor(
        size=page * BLOCKS * LAYERS,
        layers=names,
        layer_stride=page * BLOCKS if compact else page,
        block_stride=page if compact else page * LAYERS,
    )
    config = interface.KVCacheConfig(BLOCKS, [placed], [interface.KVCacheGroupSpec(names, spec)])
    raw = torch.zeros(placed.size * (1 if layout.is_block_compact else 2), dtype=torch.int8)
    views = interface.create_kv_cache_views(raw, spec, BLOCKS, layout, placed, kernel_block_size)
    return dict(zip(names, views, strict=True)), config


def test_vllm_layers_are_planes_of_heads_in_numeric_order():
    caches, config = cache_of(attention())

    layers = layers_of(caches, config)

    assert [layer.base for layer in layers] == [caches[f"model.layers.{n}.attn"].data_ptr() for n in (0, 2, 10)]
    (plane,) = layers[0].planes
    assert (plane.offset, plane.heads, plane.head_bytes) == (0, HEADS, TOKENS * 2 * SIZE * 4)
    assert layers[0].block_stride == HEADS * plane.head_bytes


def test_blocks_of_all_layers_together_are_read_layer_by_layer():
    caches, config = cache_of(attention(), "BLHNC")

    layers = layers_of(caches, config)

    assert layers[0].block_stride == LAYERS * HEADS * layers[0].planes[0].head_bytes


def test_kernel_blocks_are_planes():
    caches, config = cache_of(attention(), kernel_block_size=16)

    layers = layers_of(caches, config)

    assert [plane.offset for plane in layers[0].planes] == [0, layers[0].block_stride // 2]


def test_a_latent_cache_is_one_head():
    caches, config = cache_of(latent())

    assert [plane.heads for plane in layers_of(caches, config)[0].planes] == [1]


@pytest.mark.parametrize("layout", ["LBNHC", "LHBNC"])
def test_a_layout_with_scattered_heads_is_refused(layout):
    caches, config = cache_of(attention(), layout)

    with pytest.raises(UnsupportedLayout, match="set it to HND"):
        layers_of(caches, config)


def test_memory_shared_by_layers_is_registered_once():
    caches, config = cache_of(attention())

    (region,) = regions_of(caches)

    assert region.length == config.kv_cache_tensors[0].size
    assert (region.device, region.device_id) == ("cpu", 0)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((2, BLOCKS, HEADS, TOKENS, SIZE), "KBHNC"),
        ((2, BLOCKS, TOKENS, HEADS, SIZE), "KBNHC"),
        ((BLOCKS, 2, HEADS, TOKENS, SIZE), "BKHNC"),
        ((BLOCKS, TOKENS, SIZE), "BNC"),
    ],
)
def test_older_shapes_are_known(shape, dims):
    assert dims_of("layer", shape, attention(), BLOCKS) == dims


def engine(spec=None, *, groups=1, kv_heads=HEADS, mla=False, **parallel):
    """The configuration that refuse_unsupported reads."""
    sizes = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    }  # fmt: skip
    from vllm.v1 import kv_cache_interface as interface

    model = SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: kv_heads)
    specs = [interface.KVCacheGroupSpec([f"layers.{n}"], spec or attention()) for n in range(groups)]
    return (
        SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(**(sizes | parallel))),
        interface.KVCacheConfig(BLOCKS, [], specs),
    )


def test_plain_attention_and_latent_caches_are_served_on_any_number_of_ranks():
    refuse_unsupported(*engine())
    refuse_unsupported(*engine(tensor_parallel_size=8))
    refuse_unsupported(*engine(latent(), mla=True, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("which", "why"),
    [
        (lambda: engine(pipeline_parallel_size=2), "pipeline_parallel_size is 2: each stage holds different layers"),
        (lambda: engine(decode_context_parallel_size=2), "a block's tokens are spread over ranks"),
        (lambda: engine(prefill_context_parallel_size=2), "a block's tokens are spread over ranks"),
        (lambda: engine(kv_heads=6, tensor_parallel_size=4), "6 KV heads do not divide over 4"),
        (lambda: engine(attention(sliding_window=128)), "attends to 128 tokens only"),
        (
            lambda: engine(spec_of("SlidingWindow", block_size=32, num_kv_heads=4, head_size=8, sliding_window=64)),
            "SlidingWindowSpec",
        ),
        (lambda: engine(mamba()), "layer layers.0 is of kind MambaSpec"),
        (lambda: engine(quantised()), "quantised"),
        (lambda: engine(groups=2), "2 KV cache groups .* not one chain of blocks"),
    ],
)
def test_unsupported_engines_are_refused_at_start_with_a_reason(which, why):
    with pytest.raises(ValueError, match=why):
        refuse_unsupported(*which())


def test_the_required_layout_has_heads_outside_tokens():
    assert required_layout(engine()[0]) == "LBHNC"
    assert required_layout(engine(mla=True)[0]) is None
