"""Reads the KV cache layout from vLLM's configuration and tensors; refuses unsupported engines and versions at start.

The connector, its schedulers and the vLLM engine of the worker use interfaces that vLLM may change without notice. With
another version they might fail late, or hand over wrong KV; so an engine of another version does not start.
``tests/unit/connector/test_vllm_interfaces.py`` lists the interfaces, docs/vllm.md says how to move to another version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from connector.layout.states import StateShape, planes_of_state
from connector.layout.tensors import HOW_TO_FIX, CacheTensor, UnsupportedLayout, by_numbers, heads_of, layer_of
from connector.transfer.agent import Region
from shared.contracts.kv_exchange import KvGroup, KvGroupKind, KvLayer

KIND_OF_SPEC = {
    "FullAttentionSpec": KvGroupKind.FULL,
    "MLAAttentionSpec": KvGroupKind.FULL,
    "SlidingWindowSpec": KvGroupKind.WINDOW,
    "SlidingWindowMLASpec": KvGroupKind.WINDOW,
    "MambaSpec": KvGroupKind.STATE,
}
"""vLLM's spec classes of layers whose blocks are exchanged, by exact name: a subclass may keep its blocks differently.

Where vLLM's hybrid KV cache manager is off (chunked attention; windows without prefix caching;
``--disable-hybrid-kv-cache-manager``), layers with a window or chunks beside layers with full attention are of the
first class: they keep blocks for all tokens, and only the computation knows the window.
"""
STATE_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""Keys of models' configurations: groups of B and C in the whole model (Mamba 2)."""
EXCHANGED_QUANTISATION = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")
"""vLLM's ``KVQuantMode`` by name. Scales come with the weights or lie inside the block: its bytes suffice."""
READABLE_LAYOUTS = ("LBHNC", "BLHNC")
"""vLLM's names: L layers, B blocks, H heads, N tokens, C content, outermost first."""
ALTERNATIVE = "run this model with WORKER_CONNECTOR=upstream"
RETAINED_BLOCKS = 8
"""Blocks between the states that an engine keeps of an answer. Each takes a block of every group with a state."""
SUPPORTED = ("0.32", "0.33")
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
        ranks, kv_heads = vllm_config.parallel_config.tensor_parallel_size, kv_heads_of(vllm_config)
        layout = vllm_config.cache_config.kv_cache_layout
        heads = len(heads_of(0, ranks, kv_heads))
        refusals = [*_layout_refusals(layout, heads), *_cache_refusals(kv_cache_config, ranks, kv_heads)]
    if not refusals:
        is_cached = vllm_config.cache_config.enable_prefix_caching
        refusals = _retention_refusals(kv_cache_config) if is_cached else _uncached_refusals(kv_cache_config)
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
        "decode_context_parallel_size": "a block's tokens are spread over ranks",
        "prefill_context_parallel_size": "a block's tokens are spread over ranks",
    }
    return [
        f"{name} is {getattr(parallel, name, 1)}: {reason}; set it to 1"
        for name, reason in why.items()
        if getattr(parallel, name, 1) != 1
    ]


def _model_refusals(vllm_config: Any) -> list[str]:
    model = vllm_config.model_config
    if getattr(model, "is_attention_free", False):
        return [f"no layer of {model.architecture} has attention, so its KV has no blocks of tokens; {ALTERNATIVE}"]
    if getattr(model, "is_encoder_decoder", False):
        return [f"{model.architecture} has an encoder, whose KV does not belong to the prompt's tokens; {ALTERNATIVE}"]
    if getattr(model, "is_hybrid", False):
        return _hybrid_refusals(vllm_config)
    return []


def _hybrid_refusals(vllm_config: Any) -> list[str]:
    about = f"{vllm_config.model_config.architecture} has layers with a state"
    refusals = []
    if not vllm_config.cache_config.enable_prefix_caching:
        why = "which engines exchange where the prefix cache keeps it, and prefix caching is off"
        refusals.append(f"{about}, {why}; leave out --no-enable-prefix-caching")
    if vllm_config.speculative_config is not None:
        why = "which vLLM does not keep right together with speculative decoding and prefix caching"
        refusals.append(f"{about}, {why}; leave out --speculative-config")
    return refusals


def _layout_refusals(layout: str | None, heads: int) -> list[str]:
    """``heads``: KV heads of a rank; the layout of one head alone does not matter."""
    if heads == 1 or layout in (None, *READABLE_LAYOUTS):
        return []
    why = f"the KV cache layout is {layout}, in which the heads of a block are apart"
    return [f"{why}; {HOW_TO_FIX}, or choose another --attention-backend"]


def _cache_refusals(kv_cache_config: Any, ranks: int, kv_heads: int) -> list[str]:
    """``kv_heads``: of the whole model. At most one, of the first layer that is refused."""
    for group in kv_cache_config.kv_cache_groups:
        if group.host_resident or not group.enable_kv_transfer:
            return [f"layer {group.layer_names[0]} keeps its KV in two places (HiSparse); {ALTERNATIVE}"]
        for name, spec in _specs(group).items():
            if refusal := _layer_refusal(name, spec, ranks, kv_heads):
                return [refusal]
    return []


def _uncached_refusals(kv_cache_config: Any) -> list[str]:
    """What engines without prefix caching cannot lend. At most one, of the first layer that is refused."""
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in _specs(group).items():
            if KIND_OF_SPEC.get(type(spec).__name__) is KvGroupKind.WINDOW:
                why = (
                    "without prefix caching an ended prompt keeps the window after its last token, not that of a reader"
                )
                return [f"layer {name} has a window, and {why}; leave out --no-enable-prefix-caching"]
    return []


def _retention_refusals(kv_cache_config: Any) -> list[str]:
    """VLLM refuses the same, in another process, whose reason the worker does not get."""
    interval, groups = kv_cache_config.prefix_cache_retention_interval, kv_cache_config.kv_cache_groups
    if not interval:
        return []
    about = f"--prefix-cache-retention-interval is {interval}, but"
    if all(
        KIND_OF_SPEC[type(spec).__name__] is KvGroupKind.FULL for group in groups for spec in _specs(group).values()
    ):
        return [f"{about} no layer has a window or a state; leave it out"]
    step = lcm(*(group.kv_cache_spec.block_size for group in groups))
    why = f"windows and states are kept where the blocks of all groups end, every {step} tokens"
    return [f"{about} {why}; set it to 0 or to a multiple of {step}"] if interval % step else []


def _layer_refusal(name: str, spec: Any, ranks: int, kv_heads: int) -> str:
    kind = type(spec).__name__
    if kind == "ChunkedLocalAttentionSpec":
        remedy = "unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
        return f"layer {name} is of kind {kind}, which keeps a prefix' last chunk only; {remedy}"
    if kind not in KIND_OF_SPEC:
        return f"layer {name} is of kind {kind}, whose blocks are not known to represent a prefix; {ALTERNATIVE}"
    if not spec.prefix_cacheable:
        return f"layer {name} ({kind}) computes its window again instead of caching it; {ALTERNATIVE}"
    if KIND_OF_SPEC[kind] is KvGroupKind.STATE:
        if spec.mamba_cache_mode == "align":
            return ""
        return f"layer {name} keeps no state of a prefix (mamba_cache_mode {spec.mamba_cache_mode}); {ALTERNATIVE}"
    return _attention_refusal(name, spec, ranks, kv_heads)


def _attention_refusal(name: str, spec: Any, ranks: int, kv_heads: int) -> str:
    if spec.kv_quant_mode.name not in EXCHANGED_QUANTISATION:
        about = f"layer {name} stores quantised KV ({spec.kv_quant_mode.name}), whose scales are not exchanged"
        return f"{about}; set --kv-cache-dtype to auto, fp8 or fp8_per_token_head"
    if spec.num_heads != spec.num_kv_heads:
        return f"layer {name} packs {spec.num_kv_heads} KV heads into {spec.num_heads}; {ALTERNATIVE}"
    try:
        _heads_of_layer(name, spec, ranks, kv_heads)
    except UnsupportedLayout as unsupported:
        return str(unsupported)
    return ""


def _heads_of_layer(name: str, spec: Any, ranks: int, kv_heads: int) -> int:
    """KV heads of a layer in the whole model, whose layers usually have ``kv_heads``. Raises UnsupportedLayout."""
    if spec.num_kv_heads == len(heads_of(0, ranks, kv_heads)):
        return kv_heads
    if spec.num_kv_heads > 1 or ranks == 1:
        return int(spec.num_kv_heads) * ranks
    raise UnsupportedLayout(
        f"layer {name} has one KV head on each of {ranks} ranks, where other layers have {kv_heads} over all ranks: it"
        f" is not known which ranks hold the same head; set --tensor-parallel-size to 1, or {ALTERNATIVE}"
    )


def _specs(group: Any) -> dict[str, Any]:
    """The spec of each layer by name."""
    spec = group.kv_cache_spec
    return dict(getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec))


@dataclass(frozen=True, slots=True)
class ModelHeads:
    """Heads of the whole model, and the ranks over which they are cut."""

    kv_heads: int
    ranks: int = 1
    state_groups: int = 0
    """Groups of B and C (Mamba 2); 0: not known."""


def model_heads_of(vllm_config: Any) -> ModelHeads:
    text = vllm_config.model_config.hf_text_config
    given = (getattr(text, name, None) for name in STATE_GROUPS)
    return ModelHeads(
        kv_heads=kv_heads_of(vllm_config),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        state_groups=next((int(groups) for groups in given if groups), 0),
    )


def layers_of(kv_caches: dict[str, Any], kv_cache_config: Any, model: ModelHeads) -> list[KvLayer]:
    """Addresses of each layer's blocks, ordered by layer number. Raises UnsupportedLayout.

    A layer that shares another layer's cache is omitted.
    """
    blocks = kv_cache_config.num_blocks
    specs = {
        name: (group, spec)
        for group, of in enumerate(kv_cache_config.kv_cache_groups)
        for name, spec in _specs(of).items()
    }
    return [_layer(name, kv_caches[name], *specs[name], blocks, model) for name in sorted(specs, key=by_numbers)]


def groups_of(kv_cache_config: Any) -> list[KvGroup]:
    """The KV cache groups as peers see them."""
    return [
        _group(group.kv_cache_spec.block_size, next(iter(_specs(group).values()), group.kv_cache_spec))
        for group in kv_cache_config.kv_cache_groups
    ]


def beyond_boundaries(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """How many tokens beyond a boundary full attention, and the windows, must be cached for vLLM to find it: with a
    drafter it drops the last block of what it finds. It does so in the groups that it takes for the drafter's, or in
    all. 0 for full attention alone, of which each prefix is of use.
    """
    speculative, groups = vllm_config.speculative_config, kv_cache_config.kv_cache_groups
    if speculative is None or not speculative.use_eagle_block_drop():
        return 0, 0
    if len(groups) == 1 and all(
        KIND_OF_SPEC.get(type(spec).__name__) is KvGroupKind.FULL for spec in _specs(groups[0]).values()
    ):
        return 0, 0
    sizes: dict[KvGroupKind | None, int] = {}
    for group in [group for group in groups if group.is_eagle_group] or groups:
        kind = KIND_OF_SPEC.get(type(next(iter(_specs(group).values()))).__name__)
        sizes[kind] = max(sizes.get(kind, 0), group.kv_cache_spec.block_size)
    return sizes.get(KvGroupKind.FULL, 0), sizes.get(KvGroupKind.WINDOW, 0)


def dropped_from_hits(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens at the end of what vLLM finds cached it does not use: with one group and EAGLE or MTP, the last
    block of those before the prompt's last token. With several groups it looks a block further first: see
    ``beyond_boundaries``.
    """
    speculative, groups = vllm_config.speculative_config, kv_cache_config.kv_cache_groups
    drops = speculative is not None and speculative.use_eagle_block_drop()
    return int(groups[0].kv_cache_spec.block_size) if drops and len(groups) == 1 else 0


def _group(block_size: int, spec: Any) -> KvGroup:
    kind = KIND_OF_SPEC[type(spec).__name__]
    window = int(spec.sliding_window) + int(spec.extra_retained_tokens) if kind is KvGroupKind.WINDOW else 0
    return KvGroup(kind=kind, block_size=block_size, window=window)


def _layer(name: str, cache: Any, group: int, spec: Any, blocks: int, model: ModelHeads) -> KvLayer:
    if KIND_OF_SPEC[type(spec).__name__] is KvGroupKind.STATE:
        return _state_layer(name, cache, group, spec, blocks, model)
    return layer_of(
        _tensor(name, cache, group, spec, blocks), blocks, _heads_of_layer(name, spec, model.ranks, model.kv_heads)
    )


def _state_layer(name: str, cache: Any, group: int, spec: Any, blocks: int, model: ModelHeads) -> KvLayer:
    """VLLM gives the state as bytes, whose blocks are as far apart as those of attention and mostly longer than it."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    state = StateShape(
        kind=spec.mamba_type.name,
        shapes=spec.shapes,
        itemsizes=tuple(dtype.itemsize for dtype in spec.dtypes),
        is_replicated=spec.tp_replicated,
        is_column_first=is_conv_state_dim_first(),
    )
    size = cache.element_size()
    if cache.shape[0] != blocks or cache[0].numel() * size != state.content_bytes or not cache[0].is_contiguous():
        raise UnsupportedLayout(
            f"the state of {name} has shape {tuple(cache.shape)}, not {blocks} blocks of {state.content_bytes} bytes;"
            f" {ALTERNATIVE}"
        )
    return KvLayer(
        name=name,
        group=group,
        base=cache.data_ptr(),
        block_stride=cache.stride(0) * size,
        planes=planes_of_state(state, model.ranks, model.state_groups),
    )


def retain_answers(kv_cache_config: Any) -> None:
    """Let vLLM keep windows and states within answers: all windows, which are there anyway, and some states."""
    groups = groups_of(kv_cache_config)
    kinds = {group.kind for group in groups}
    if KvGroupKind.STATE in kinds:
        kv_cache_config.prefix_cache_retention_interval = RETAINED_BLOCKS * lcm(*(group.block_size for group in groups))
    elif KvGroupKind.WINDOW in kinds:
        kv_cache_config.prefix_cache_retention_interval = None


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


def series_of(version: str) -> str:
    """The release series of a version: 0.33 of 0.33.0+cpu."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


def check_version(version: str) -> None:
    """Raises UnsupportedEngine for a version that is not supported."""
    if series_of(version) not in SUPPORTED:
        known = " and ".join(f"{one}.x" for one in SUPPORTED)
        raise UnsupportedEngine(
            f"Baton supports vLLM {known}, and this is vLLM {version}: install a supported version."
        )
