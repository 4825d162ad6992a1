"""The layout read from vLLM's KV caches, and which engines are refused with what reason."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from connector.layout.engine_layout import (
    ModelHeads,
    UnsupportedEngine,
    dims_of,
    layers_of,
    refuse_unsupported,
    regions_of,
    required_layout,
)
from connector.layout.routes import ReaderRank, routes_to, spans_of
from connector.layout.tensors import UnsupportedLayout
from shared.contracts.kv_exchange import KvRank
from tests.support.kv_engines import Shape, handshake
from tests.support.vllm_releases import kv_cache_config_of

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


def mamba(mode="none"):
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


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

    layers = layers_of(caches, config, ModelHeads(HEADS))

    assert [layer.base for layer in layers] == [caches[f"model.layers.{n}.attn"].data_ptr() for n in (0, 2, 10)]
    (plane,) = layers[0].planes
    assert (plane.offset, plane.heads, plane.head_bytes) == (0, HEADS, TOKENS * 2 * SIZE * 4)
    assert layers[0].block_stride == HEADS * plane.head_bytes


def test_blocks_of_all_layers_together_are_read_layer_by_layer():
    caches, config = cache_of(attention(), "BLHNC")

    layers = layers_of(caches, config, ModelHeads(HEADS))

    assert layers[0].block_stride == LAYERS * HEADS * layers[0].planes[0].head_bytes


def test_kernel_blocks_are_planes():
    caches, config = cache_of(attention(), kernel_block_size=16)

    layers = layers_of(caches, config, ModelHeads(HEADS))

    assert [plane.offset for plane in layers[0].planes] == [0, layers[0].block_stride // 2]


def test_a_latent_cache_is_one_head():
    caches, config = cache_of(latent())

    assert [plane.heads for plane in layers_of(caches, config, ModelHeads(1))[0].planes] == [1]


@pytest.mark.parametrize("layout", ["LBNHC", "LHBNC"])
def test_a_layout_with_scattered_heads_is_refused(layout):
    caches, config = cache_of(attention(), layout)

    with pytest.raises(UnsupportedLayout, match="set it to HND"):
        layers_of(caches, config, ModelHeads(HEADS))


def test_the_reason_for_a_refused_layout_reaches_the_worker(tmp_path):
    from connector.connector import refusals_saved

    caches, config = cache_of(attention(), "LBNHC")
    with pytest.raises(UnsupportedLayout), refusals_saved(str(tmp_path / "refused")):
        layers_of(caches, config, ModelHeads(HEADS))

    assert "set it to HND" in (tmp_path / "refused").read_text()


@pytest.mark.parametrize("mode", ["FP8_PER_TENSOR", "FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD"])
def test_the_scales_of_quantised_blocks_are_copied_with_them(mode):
    import torch

    spec = quantised(mode, dtype=torch.uint8, state_content_bytes=2 * SIZE + 8)
    caches, config = cache_of(spec)

    (plane,) = layers_of(caches, config, ModelHeads(HEADS))[0].planes

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


def cache_config(block_size=TOKENS, layout=None, *, caching=True):
    from vllm.config import CacheConfig

    config = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
    config.kv_cache_layout = layout
    return config


def engine(
    spec=None, *, kv_heads=HEADS, mla=False, model=None, cache=None, drafts=False, kept_elsewhere=False, **parallel
):
    """The configuration that refuse_unsupported and required_layout read."""
    sizes = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    }  # fmt: skip
    from vllm.v1 import kv_cache_interface as interface

    about = {"architecture": "TinyForCausalLM", **(model or {})}
    model = SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: kv_heads, **about)
    group = interface.KVCacheGroupSpec(["layers.0"], spec or attention(), enable_kv_transfer=not kept_elsewhere)
    return (
        SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(**(sizes | parallel)),
            speculative_config=object() if drafts else None,
            cache_config=cache or cache_config(),
        ),
        interface.KVCacheConfig(BLOCKS, [], [group]),
    )


def test_plain_attention_and_latent_caches_are_served_on_any_number_of_ranks():
    refuse_unsupported(*engine())
    refuse_unsupported(*engine(attention(num_kv_heads=1), tensor_parallel_size=8))
    refuse_unsupported(*engine(latent(), mla=True, tensor_parallel_size=2))


def test_the_layout_of_a_single_head_does_not_matter():
    one = engine(attention(num_kv_heads=1), tensor_parallel_size=HEADS, cache=cache_config(layout="LBNHC"))

    refuse_unsupported(*one)


def test_windows_and_states_are_served():
    refuse_unsupported(*engine(windows("SlidingWindow", sliding_window=64)))
    refuse_unsupported(*engine(mamba(mode="align"), model={"is_hybrid": True}))


@pytest.mark.parametrize(
    ("spec", "interval", "why"),
    [
        ("window", 3 * TOKENS, ""),
        ("window", 0, ""),
        ("window", None, ""),
        ("window", TOKENS + 1, f"is {TOKENS + 1}, but .*; set it to 0 or to a multiple of {TOKENS}"),
        ("full", TOKENS, f"is {TOKENS}, but no layer has a window or a state; leave it out"),
        ("full", 0, ""),
    ],
)
def test_a_retention_interval_at_which_no_prefix_ends_is_refused_with_one_that_works(spec, interval, why):
    config, cache = engine(windows("SlidingWindow", sliding_window=64) if spec == "window" else attention())
    cache.prefix_cache_retention_interval = interval

    with pytest.raises(UnsupportedEngine, match=why) if why else nullcontext():
        refuse_unsupported(config, cache)


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
        (lambda: engine(decode_context_parallel_size=2), "a block's tokens are spread over ranks"),
        (lambda: engine(prefill_context_parallel_size=2), "a block's tokens are spread over ranks"),
        (lambda: engine(kv_heads=6, tensor_parallel_size=4), "6 KV heads do not divide over 4"),
        (
            lambda: engine(windows("ChunkedLocalAttention", attention_chunk_size=64)),
            "kind ChunkedLocalAttentionSpec.*; unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
        ),
        (
            lambda: engine(windows("SlidingWindowMLA", sliding_window=64, bounded_replay=True)),
            "computes its window again",
        ),
        (lambda: engine(rswa()), "kind RSWASpec"),
        (lambda: engine(layers_of_kinds(attention(), rswa())), "layer layers.1 is of kind RSWASpec"),
        (lambda: engine(mamba()), "layer layers.0 keeps no state of a prefix"),
        (lambda: engine(quantised("NVFP4")), "quantised KV .NVFP4.*set --kv-cache-dtype to auto"),
        (
            lambda: engine(
                layers_of_kinds(attention(num_kv_heads=2), attention(num_kv_heads=1)), tensor_parallel_size=2
            ),
            "layer layers.1 has one KV head on each of 2 ranks, where other layers have 4",
        ),
        (lambda: engine(attention(num_head_slots=2)), "packs 4 KV heads into 2"),
        (lambda: engine(model={"is_attention_free": True}), "no layer of TinyForCausalLM has attention"),
        (
            lambda: engine(model={"is_hybrid": True}, cache=cache_config(caching=False)),
            "TinyForCausalLM has layers with a state, .* prefix caching is off; leave out --no-enable-prefix-caching",
        ),
        (
            lambda: engine(windows("SlidingWindow", sliding_window=64), cache=cache_config(caching=False)),
            "layer layers.0 has a window, .* leave out --no-enable-prefix-caching",
        ),
        (
            lambda: engine(model={"is_hybrid": True}, drafts=True),
            "has layers with a state, .*leave out --speculative-config",
        ),
        (lambda: engine(model={"is_encoder_decoder": True}), "TinyForCausalLM has an encoder"),
        (lambda: engine(kept_elsewhere=True), "layer layers.0 keeps its KV in two places"),
        (
            lambda: engine(cache=cache_config(layout="LBNHC")),
            "layout is LBNHC, in which the heads .* apart; .* or set it to HND, or choose another --attention-backend",
        ),
    ],
)
def test_unsupported_engines_are_refused_at_start_with_a_reason(which, why):
    with pytest.raises(UnsupportedEngine, match=why):
        refuse_unsupported(*which())


@pytest.mark.parametrize(
    ("is_cuda", "about", "layout"),
    [
        (False, {}, "LBHNC"),
        (False, {"mla": True}, None),
        (True, {"block_size": None}, "BLHNC"),
        (True, {"block_size": None, "mla": True}, "BLHNC"),
        (True, {"block_size": None, "skipped": ["0"]}, "LBHNC"),
        (True, {"block_size": 64}, "LBHNC"),
        (True, {"block_size": 64, "mla": True}, None),
    ],
)
def test_layers_of_a_block_are_together_on_cuda_if_vllm_chooses_the_block_size(is_cuda, about, layout):
    cache = cache_config(about.get("block_size", TOKENS))
    cache.kv_cache_dtype_skip_layers = about.get("skipped", [])
    config, _ = engine(mla=about.get("mla", False), cache=cache)

    assert required_layout(config, is_cuda=is_cuda) == layout


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "FLASHMLA"])
def test_backends_of_cuda_take_both_layouts_with_heads_outside_tokens(backend):
    """A backend without the layout asked for would get its favourite one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    layouts = get_supported_kv_cache_layouts([AttentionBackendEnum[backend].get_class()])

    assert {"LBHNC", "BLHNC"} <= {layout.name for layout in layouts}


def test_vllm_may_not_unmap_memory_that_peers_read():
    pytest.importorskip("vllm")
    from connector.connector import BatonConnector

    assert not BatonConnector.supports_sleep_mode(None)


def allocated(layout, blocks, *specs):
    """One rank's KV cache as vLLM allocates it, filled with random numbers, and a handshake that describes it."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    names = [f"layers.{number}" for number in range(len(specs))]
    cache = cache_config(layout=layout)
    cache.num_gpu_blocks_override = blocks
    engine = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None), cache_config=cache)
    groups = [KVCacheGroupSpec(names, specs[0] if len(set(specs)) == 1 else layers_of_kinds(*specs))]
    config = kv_cache_config_of(engine, groups, 1 << 20)
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    for tensor in caches.values():
        tensor.copy_(torch.rand(tensor.shape))
    rank = KvRank(rank=0, agent=b"", device="cpu", device_id=0, layers=layers_of(caches, config, ModelHeads(HEADS)))
    return caches, handshake([rank], Shape(blocks=blocks))


@pytest.mark.parametrize("sizes", [(SIZE, SIZE, SIZE), (2 * SIZE, SIZE, SIZE)], ids=["equal", "as Gemma 4's"])
@pytest.mark.parametrize(
    ("holder", "reader", "spans"),
    [("LBHNC", "BLHNC", 2 * LAYERS), ("BLHNC", "LBHNC", 2 * LAYERS), ("BLHNC", "BLHNC", 1)],
)
def test_blocks_are_read_between_vllms_layouts(sizes, holder, reader, spans):
    import torch

    specs = [attention(head_size=size) for size in sizes]
    held, peer = allocated(holder, BLOCKS, *specs)
    read, own = allocated(reader, 2 * BLOCKS, *specs)
    before = {name: cache.clone() for name, cache in read.items()}

    (route,) = routes_to(ReaderRank(own.ranks[0], 1), peer)
    there, here = spans_of(route, [2, 3], [8, 9])
    for (source, length, _), (target, _, _) in zip(there.tolist(), here.tolist(), strict=True):
        ctypes.memmove(target, source, length)

    assert len(there) == spans
    for name, cache in read.items():
        assert torch.equal(cache[8:10], held[name][2:4])
        assert torch.equal(cache[:8], before[name][:8])
        assert torch.equal(cache[10:], before[name][10:])
