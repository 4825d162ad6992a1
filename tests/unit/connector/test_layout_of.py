"""The layout read from vLLM's KV caches, and which engines are refused with what reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.layout.engine_layout import (
    UnsupportedEngine,
    dims_of,
    layers_of,
    refuse_unsupported,
    regions_of,
    required_layout,
    window_price,
)
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


def quantised(mode, **changes):
    from vllm.v1.kv_cache_interface import KVQuantMode

    return attention(kv_quant_mode=KVQuantMode[mode], **changes)


def rswa():
    """A subclass of FullAttentionSpec that frees blocks in the middle."""
    return spec_of("RSWA", block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, rswa_window=64)


def windows(kind, **values):
    return spec_of(kind, block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, **values)


def layers_of_kinds(*specs):
    """One group of layers of different specs, as vLLM makes of layers with different page sizes."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(
        block_size=TOKENS, kv_cache_specs={f"layers.{number}": spec for number, spec in enumerate(specs)}
    )


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


@pytest.mark.parametrize("mode", ["FP8_PER_TENSOR", "FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD"])
def test_the_scales_of_quantised_blocks_are_copied_with_them(mode):
    import torch

    spec = quantised(mode, dtype=torch.uint8, state_content_bytes=2 * SIZE + 8)
    caches, config = cache_of(spec)

    (plane,) = layers_of(caches, config)[0].planes

    assert plane.heads * plane.head_bytes == spec.page_size_bytes == HEADS * TOKENS * (2 * SIZE + 8)


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


def engine(spec=None, *, groups=1, kv_heads=HEADS, mla=False, hybrid_off=True, model=None, **parallel):
    """The configuration that refuse_unsupported reads."""
    sizes = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    }  # fmt: skip
    from vllm.v1 import kv_cache_interface as interface

    about = {"architecture": "TinyForCausalLM", **(model or {})}
    model = SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: kv_heads, **about)
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=hybrid_off)
    specs = [interface.KVCacheGroupSpec([f"layers.{n}"], spec or attention()) for n in range(groups)]
    return (
        SimpleNamespace(
            model_config=model, parallel_config=SimpleNamespace(**(sizes | parallel)), scheduler_config=scheduler
        ),
        interface.KVCacheConfig(BLOCKS, [], specs),
    )


def test_plain_attention_and_latent_caches_are_served_on_any_number_of_ranks():
    refuse_unsupported(*engine())
    refuse_unsupported(*engine(attention(num_kv_heads=1), tensor_parallel_size=8))
    refuse_unsupported(*engine(latent(), mla=True, tensor_parallel_size=2))


def test_windows_and_chunks_that_keep_all_blocks_are_served():
    refuse_unsupported(*engine(attention(sliding_window=128)))
    refuse_unsupported(*engine(attention(attention_chunk_size=128)))
    refuse_unsupported(*engine(layers_of_kinds(attention(sliding_window=64), attention(head_size=2 * SIZE))))


@pytest.mark.parametrize("mode", ["FP8_PER_TENSOR", "FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD"])
def test_quantised_kv_whose_scales_are_in_the_block_or_the_weights_is_served(mode):
    refuse_unsupported(*engine(quantised(mode)))


@pytest.mark.parametrize(
    ("which", "why"),
    [
        (lambda: engine(pipeline_parallel_size=2), "pipeline_parallel_size is 2: each stage holds different layers"),
        (lambda: engine(decode_context_parallel_size=2), "a block's tokens are spread over ranks"),
        (lambda: engine(prefill_context_parallel_size=2), "a block's tokens are spread over ranks"),
        (lambda: engine(nnodes=2), "nnodes is 2: a lease ends at an instant of one host's clock"),
        (lambda: engine(kv_heads=6, tensor_parallel_size=4), "6 KV heads do not divide over 4"),
        (
            lambda: engine(windows("SlidingWindow", sliding_window=64)),
            "every layer attends to 64 tokens only .SlidingWindowSpec.*; run this model with WORKER_CONNECTOR=upstream",
        ),
        (lambda: engine(windows("ChunkedLocalAttention", attention_chunk_size=64)), "kind ChunkedLocalAttentionSpec"),
        (lambda: engine(rswa()), "kind RSWASpec"),
        (lambda: engine(layers_of_kinds(attention(), rswa())), "layer layers.1 is of kind RSWASpec"),
        (lambda: engine(mamba()), "layer layers.0 is of kind MambaSpec"),
        (lambda: engine(quantised("NVFP4")), "quantised KV .NVFP4.*set --kv-cache-dtype to auto"),
        (
            lambda: engine(layers_of_kinds(attention(), attention(num_kv_heads=2))),
            "layer layers.1 has 2 KV heads on a rank, other layers have 4",
        ),
        (lambda: engine(attention(num_head_slots=2)), "packs 4 KV heads into 2"),
        (lambda: engine(model={"is_hybrid": True}), "TinyForCausalLM has layers with a state"),
        (lambda: engine(model={"is_encoder_decoder": True}), "TinyForCausalLM has an encoder"),
        (lambda: engine(hybrid_off=False), "leave out --no-disable-hybrid-kv-cache-manager"),
        (
            lambda: engine(kv_heads=6, tensor_parallel_size=4, model={"is_hybrid": True}),
            "a state .*6 KV heads do not divide",
        ),
        (lambda: engine(groups=2), "2 KV cache groups .* not one chain of blocks"),
    ],
)
def test_unsupported_engines_are_refused_at_start_with_a_reason(which, why):
    with pytest.raises(UnsupportedEngine, match=why):
        refuse_unsupported(*which())


def model_with(types, max_model_len=16_384, **values):
    text = SimpleNamespace(layer_types=types, **values)
    return SimpleNamespace(hf_text_config=text, max_model_len=max_model_len)


def test_the_memory_price_of_windows_is_told():
    gemma = model_with((["sliding_attention"] * 5 + ["full_attention"]) * 4, sliding_window=1024)
    llama = model_with(["chunked_attention"] * 3 + ["full_attention"], sliding_window=None, attention_chunk_size=8192)

    assert "20 of 24 layers attend to 1024 tokens" in window_price(gemma)
    assert "a prompt of 16384 tokens takes 4.6 times the KV memory" in window_price(gemma)
    assert "a prompt of 16384 tokens takes 1.6 times" in window_price(llama)


@pytest.mark.parametrize(
    "model",
    [
        model_with(["full_attention"] * 4, sliding_window=1024),
        model_with(["sliding_attention", "full_attention"], max_model_len=1024, sliding_window=1024),
        model_with(None),
    ],
)
def test_windows_that_cost_nothing_have_no_price(model):
    assert window_price(model) == ""


def test_the_required_layout_has_heads_outside_tokens():
    assert required_layout(engine()[0]) == "LBHNC"
    assert required_layout(engine(mla=True)[0]) is None
