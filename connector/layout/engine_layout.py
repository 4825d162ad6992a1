"""Reads the KV cache layout from vLLM's configuration and tensors; refuses unsupported engines and versions at start.

The connector, its schedulers and the vLLM engine of the worker use interfaces that vLLM may change without notice. With
another version they might fail late, or hand over wrong KV; so an engine of another version does not start.
``tests/unit/connector/test_vllm_interfaces.py`` lists the interfaces, docs/vllm.md says how to move to another version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from connector.layout.tensors import HOW_TO_FIX, CacheTensor, UnsupportedLayout, heads_of, layer_of
from connector.transfer.agent import Region
from shared.contracts.kv_exchange import KvGroup, KvGroupKind, KvLayer

EXCHANGED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's spec classes of layers whose blocks are exchanged, by exact name: a subclass may keep its blocks differently.

vLLM turns the hybrid KV cache manager off for this connector. Layers with a window or chunks, beside layers with full
attention, are then of the first class too: they keep blocks for all tokens, and only the computation knows the window.
"""
EXCHANGED_QUANTISATION = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")
"""vLLM's ``KVQuantMode`` by name. Scales come with the weights or lie inside the block: its bytes suffice."""
READABLE_LAYOUTS = ("LBHNC", "BLHNC")
"""vLLM's names: L layers, B blocks, H heads, N tokens, C content, outermost first."""
ALTERNATIVE = "run this model with WORKER_CONNECTOR=upstream"
WINDOW_TYPES = ("sliding_attention", "chunked_attention")
"""Layer types in a model's configuration."""
TOKENS_PRICED = 32_768
"""Longest prompt for which the price of windows is logged."""
SUPPORTED = ("0.32",)
"""Release series, each with all its patch releases."""


class UnsupportedEngine(ValueError):
    """The message names each unsupported property, the reason, and the remedy."""


def required_layout(vllm_config: Any, *, is_cuda: bool) -> str | None:
    """The layout to ask vLLM for; None: any.

    Both have heads outside tokens, so that a range of heads is contiguous. ``BLHNC`` also keeps the layers of a block
    together: it is one piece to read. It is left alone where the answer could be an engine that does not start. An
    attention backend without the wanted layout gets its favourite one, which on other platforms than CUDA may be one
    whose heads are apart. And a block size that vLLM has not chosen may be larger than the kernels': vLLM cannot split
    blocks whose layers are together.
    """
    if vllm_config.model_config is None:
        return None
    cache = vllm_config.cache_config
    if is_cuda and not cache.user_specified_block_size and not cache.kv_cache_dtype_skip_layers:
        return "BLHNC"
    return None if vllm_config.model_config.use_mla else "LBHNC"


def kv_heads_of(vllm_config: Any) -> int:
    """KV heads of the whole model; 1 for a latent cache."""
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedEngine that names each unsupported property of this engine, the reason, and the remedy."""
    refusals = config_refusals(vllm_config)
    if not refusals:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        heads = len(heads_of(0, ranks, kv_heads_of(vllm_config)))
        layout = vllm_config.cache_config.kv_cache_layout
        refusals = [*_layout_refusals(layout, heads), *_cache_refusals(kv_cache_config, heads)]
    refuse(refusals)


def refuse(refusals: list[str]) -> None:
    """Raises UnsupportedEngine if there are any."""
    if refusals:
        raise UnsupportedEngine("The Baton connector cannot exchange this engine's KV: " + "; ".join(refusals) + ".")


def config_refusals(vllm_config: Any) -> list[str]:
    """What vLLM's resolved configuration shows before the model is loaded."""
    refusals = [*_parallel_refusals(vllm_config.parallel_config), *_model_refusals(vllm_config)]
    try:
        heads_of(0, vllm_config.parallel_config.tensor_parallel_size, kv_heads_of(vllm_config))
    except UnsupportedLayout as unsupported:
        refusals.append(str(unsupported))
    return refusals


def _parallel_refusals(parallel: Any) -> list[str]:
    why = {
        "pipeline_parallel_size": "each stage holds different layers, and a rank reads from ranks with the same layers",
        "decode_context_parallel_size": "a block's tokens are spread over ranks",
        "prefill_context_parallel_size": "a block's tokens are spread over ranks",
        "nnodes": "a lease ends at an instant of one host's clock, which the ranks of another host do not have",
    }
    return [
        f"{name} is {getattr(parallel, name, 1)}: {reason}; set it to 1"
        for name, reason in why.items()
        if getattr(parallel, name, 1) != 1
    ]


def _model_refusals(vllm_config: Any) -> list[str]:
    model = vllm_config.model_config
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        why = "has layers with a state (Mamba, linear attention, short convolution)"
        return [f"{model.architecture} {why}, which blocks of tokens do not contain; {ALTERNATIVE}"]
    if getattr(model, "is_encoder_decoder", False):
        return [f"{model.architecture} has an encoder, whose KV does not belong to the prompt's tokens; {ALTERNATIVE}"]
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is False:
        why = "the hybrid KV cache manager is on: layers with a window would keep only some blocks of a prefix"
        return [f"{why}; leave out --no-disable-hybrid-kv-cache-manager"]
    return []


def _layout_refusals(layout: str | None, heads: int) -> list[str]:
    """``heads``: KV heads of a rank; the layout of one head alone does not matter."""
    if heads == 1 or layout in (None, *READABLE_LAYOUTS):
        return []
    why = f"the KV cache layout is {layout}, in which the heads of a block are apart"
    return [f"{why}; {HOW_TO_FIX}, or choose another --attention-backend"]


def _cache_refusals(kv_cache_config: Any, heads: int) -> list[str]:
    """``heads``: KV heads of a rank."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        refusals = (_layer_refusal(name, spec, heads) for name, spec in _specs(groups[0]).items())
        return [refusal for refusal in refusals if refusal][:1]
    kinds = ", ".join(sorted({type(spec).__name__ for group in groups for spec in _specs(group).values()}))
    about = f"it has {len(groups)} KV cache groups ({kinds}), as hybrid models do"
    return [f"{about}: a prefix is then not one chain of blocks; {ALTERNATIVE}"]


def _layer_refusal(name: str, spec: Any, heads: int) -> str:
    kind, window = type(spec).__name__, getattr(spec, "sliding_window", None)
    if kind == "SlidingWindowSpec":
        # vLLM turns windows into full attention only if some layer has full attention.
        about = f"every layer attends to {window} tokens only ({kind}), and vLLM frees the blocks before them"
        return f"{about}, so no prefix is complete; {ALTERNATIVE}"
    if kind not in EXCHANGED_SPECS:
        return f"layer {name} is of kind {kind}, whose blocks are not known to represent a prefix; {ALTERNATIVE}"
    if spec.kv_quant_mode.name not in EXCHANGED_QUANTISATION:
        about = f"layer {name} stores quantised KV ({spec.kv_quant_mode.name}), whose scales are not exchanged"
        return f"{about}; set --kv-cache-dtype to auto, fp8 or fp8_per_token_head"
    if spec.num_kv_heads != heads:
        about = f"layer {name} has {spec.num_kv_heads} KV heads on a rank, other layers have {heads}"
        return f"{about}: ranks read the same heads of all layers; {ALTERNATIVE}"
    if spec.num_heads != spec.num_kv_heads:
        return f"layer {name} packs {spec.num_kv_heads} KV heads into {spec.num_heads}; {ALTERNATIVE}"
    return ""


def window_price(model_config: Any) -> str:
    """What it costs that layers with a window keep the KV of all tokens; empty if the model has no such layers."""
    text = model_config.hf_text_config
    types = list(getattr(text, "layer_types", None) or ())
    windowed = sum(kind in WINDOW_TYPES for kind in types)
    window = getattr(text, "attention_chunk_size", None) or getattr(text, "sliding_window", None)
    tokens = min(int(model_config.max_model_len), TOKENS_PRICED)
    if not windowed or not window or window >= tokens:
        return ""
    needed = (len(types) - windowed) * tokens + windowed * int(window)
    return (
        f"{windowed} of {len(types)} layers attend to {window} tokens but keep the KV of all, so that prefixes can be"
        f" exchanged: a prompt of {tokens} tokens takes {len(types) * tokens / needed:.1f} times the KV memory that it"
        " takes with vLLM's hybrid manager"
    )


def _specs(group: Any) -> dict[str, Any]:
    """The spec of each layer by name."""
    spec = group.kv_cache_spec
    return dict(getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec))


def layers_of(kv_caches: dict[str, Any], kv_cache_config: Any, kv_heads: int) -> list[KvLayer]:
    """Addresses of each layer's blocks, ordered by layer number. ``kv_heads``: of the whole model. Raises
    UnsupportedLayout.

    A layer that shares another layer's cache is omitted.
    """
    blocks = kv_cache_config.num_blocks
    specs = {
        name: (group, spec)
        for group, of in enumerate(kv_cache_config.kv_cache_groups)
        for name, spec in _specs(of).items()
    }
    tensors = [_tensor(name, kv_caches[name], *specs[name], blocks) for name in sorted(specs, key=_by_numbers)]
    return [layer_of(tensor, blocks, kv_heads) for tensor in tensors]


def groups_of(kv_cache_config: Any) -> list[KvGroup]:
    """The KV cache groups as peers see them."""
    return [
        KvGroup(kind=KvGroupKind.FULL, block_size=group.kv_cache_spec.block_size)
        for group in kv_cache_config.kv_cache_groups
    ]


def _by_numbers(name: str) -> list[Any]:
    """Sort key with ``layers.10`` after ``layers.2``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _tensor(name: str, cache: Any, group: int, spec: Any, blocks: int) -> CacheTensor:
    itemsize = cache.element_size()
    return CacheTensor(
        name=name,
        group=group,
        address=cache.data_ptr(),
        dims=dims_of(name, tuple(cache.shape), spec, blocks),
        shape=tuple(cache.shape),
        strides=tuple(stride * itemsize for stride in cache.stride()),
        itemsize=itemsize,
    )


def dims_of(name: str, shape: tuple[int, ...], spec: Any, blocks: int) -> str:
    """Dimensions of a cache tensor as letters (see ``layout.tensors``). Raises UnsupportedLayout."""
    if len(shape) == 4:  # vLLM from 0.32 on: keys and values of a token side by side, or a latent cache
        return "BHNC"
    if len(shape) == 3:
        return "BNC"
    if len(shape) == 5 and 2 in shape[:2]:
        inner = "HNC" if shape[2] == spec.num_kv_heads and shape[2] != shape[3] else "NHC"
        return ("KB" if shape[0] == 2 and shape[1] % blocks == 0 else "BK") + inner
    raise UnsupportedLayout(f"the KV cache of {name} has shape {shape}, which is no known layout")


def regions_of(kv_caches: dict[str, Any]) -> list[Region]:
    """The memory of the tensors; memory that several layers share appears once."""
    regions = {}
    for cache in kv_caches.values():
        storage = cache.untyped_storage()
        device = cache.device.type
        regions[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes(), device, max(cache.get_device(), 0))
    return list(regions.values())


def memory_reader(kv_caches: dict[str, Any]) -> Callable[[int, int], bytes]:
    """A function that returns bytes of the tensors' memory, on any device, by address and length."""
    import torch  # Whoever imports this module for its refusals need not wait ten seconds.

    flat = {}
    for cache in kv_caches.values():
        storage = cache.untyped_storage()
        flat[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)

    def read(address: int, length: int) -> bytes:
        base = max((one for one in flat if one <= address), default=-1)
        if base < 0 or address + length > base + flat[base].nbytes:
            raise ValueError(f"no KV cache has {length} bytes at {address}")
        content: bytes = flat[base][address - base : address - base + length].cpu().numpy().tobytes()
        return content

    return read


def check_version(version: str) -> None:
    """Raises UnsupportedEngine for a version that is not supported."""
    series = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    if series not in SUPPORTED:
        known = " and ".join(f"{one}.x" for one in SUPPORTED)
        raise UnsupportedEngine(
            f"Baton supports vLLM {known}, and this is vLLM {version}: install a supported version."
        )
