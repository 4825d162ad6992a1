"""Layouts of a worker over GPUs: what tensor, pipeline and data parallelism make of an engine's speeds and memory.

Everything is scaled from the profile's own layout, which has one stage and no data parallel ranks, with published
formulas; nothing here was measured.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import msgspec

from replay.profile import Profile
from replay.split import LETTERS

GPU_BYTES = 80e9 * 0.9
"""Memory of one GPU that vLLM may use."""
HOST_GPUS = 8
"""GPUs of a host, which NVLink connects. Larger engines and groups use the network."""
NVLINK_BYTES_PER_S = 360e9
"""80 % of the 450 GB/s in each direction of an H100."""
NETWORK_BYTES_PER_S = 25e9
"""200 Gbit/s for each GPU."""
EXCHANGE_S = 10e-6
"""Latency of one exchange between GPUs."""
LAYER_S = 0.1e-3
"""The least that a layer takes in a step, however many GPUs share it: the profile 80b-a3b assumes the same."""
ACTIVATION_BYTES = 2
RANKS_MAX = 1024


class LayoutError(ValueError):
    """The layout cannot be planned with; the message says why."""


class Layout(msgspec.Struct, frozen=True):
    """How one engine, or one data parallel group, is laid out over GPUs."""

    tensor: int = 1
    """Tensor parallel ranks of each stage."""
    pipeline: int = 1
    """Pipeline stages."""
    data: int = 1
    """Data parallel ranks, of which each has all stages."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        parts = {"TP": self.tensor, "PP": self.pipeline, "DP": self.data}
        return " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1) or "TP 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a layout has to know of a profile's model."""

    gpus: int
    """Tensor parallel ranks for which the profile's speeds are."""
    weight_bytes: float
    expert_bytes: float = 0.0
    """The part of the weights that experts are."""
    layers: int
    hidden: int
    kv_heads: int
    experts_per_token: int = 0


SHAPES = {
    "8b": Shape(gpus=1, weight_bytes=16e9, layers=32, hidden=4096, kv_heads=8),
    "70b": Shape(gpus=4, weight_bytes=140e9, layers=80, hidden=8192, kv_heads=8),
    # In fp8; 48 layers of 512 experts with 3 matrices of 2,048 x 512.
    "80b-a3b": Shape(
        gpus=2, weight_bytes=80e9, expert_bytes=77.3e9, layers=48, hidden=2048, kv_heads=2, experts_per_token=10
    ),
}
"""The model of each profile."""


def layout_of(text: str) -> Layout:
    """Parse ``TP4xPP2``, ``tp2xdp8`` or ``DP4``. Raises LayoutError."""
    sizes: dict[str, int] = {}
    for part in re.split(r"\s*x\s*", text.strip().lower()):
        match = re.fullmatch(r"(tp|pp|dp)\s*([1-9]\d{0,3})", part)
        if match is None or match[1] in sizes:
            raise LayoutError(f"{text!r} is no layout; write TP4, TP4xPP2 or TP1xDP8 (tensor, pipeline, data parallel)")
        sizes[match[1]] = int(match[2])
    layout = Layout(sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1))
    if layout.gpus > RANKS_MAX:
        raise LayoutError(f"{text!r} has {layout.gpus:,} GPUs; {RANKS_MAX} are the most")
    return layout


def layouts_of(texts: list[str], default: Layout) -> dict[str, Layout]:
    """The layout of each role, of texts such as ``decode=TP2xDP4``, or ``TP8`` for all. Raises LayoutError."""
    found = dict.fromkeys(LETTERS.values(), default)
    for text in sorted(texts, key=lambda one: "=" in one):
        role, equals, layout = text.rpartition("=")
        if equals and role.strip() not in found:
            raise LayoutError(f"{text!r}: there is no role {role.strip()!r}; write {', '.join(found)}")
        found |= dict.fromkeys([role.strip()] if equals else found, layout_of(layout))
    return found


def laid_out(base: Profile, shape: Shape, layout: Layout) -> Profile:
    """The engine in this layout. Raises LayoutError where the model does not fit.

    Compute, and reading weights and KV, are divided by the tensor parallel ranks; a step takes ``LAYER_S`` for each
    layer at least. To that comes what ``exchange_s`` says. Stages and data parallel ranks are ``Profile.step_s``'s.
    """
    _check(shape, layout)
    ratio, uneven = shape.gpus / layout.tensor, _uneven(shape, layout)
    own = Layout(tensor=shape.gpus)
    own_s, token_s = exchange_s(shape, own), exchange_s(shape, layout)
    compute_s = (1 / base.prefill_tokens_per_s - own_s[1]) * ratio * uneven
    weights_s = base.decode_base_s - own_s[0]
    weights_s = max(weights_s * ratio, min(weights_s, LAYER_S * shape.layers)) * uneven
    gpus_before, gpus_now = shape.gpus, layout.gpus
    return replace(
        base,
        prefill_tokens_per_s=1 / (compute_s + token_s[1]),
        prefill_s_per_pair=base.prefill_s_per_pair * ratio * uneven,
        decode_base_s=weights_s + token_s[0],
        decode_per_sequence_s=base.decode_per_sequence_s * ratio * uneven + max(0.0, token_s[1] - own_s[1] * ratio),
        decode_per_context_token_s=base.decode_per_context_token_s
        * (min(shape.gpus, shape.kv_heads) / min(layout.tensor, shape.kv_heads))
        * uneven,
        transfer_bytes_per_s=base.transfer_bytes_per_s * gpus_now / gpus_before,
        kv_blocks=layout.data * kv_blocks_of(base, shape, layout),
        stages=layout.pipeline,
        data_ranks=layout.data,
    )


def exchange_s(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Seconds that exchanges between GPUs add to a step, and to each token of its largest batch.

    Tensor parallelism: two all-reduces for each layer (Shoeybi et al., Megatron-LM, 2019, section 3), of which a ring
    of ``n`` sends ``2 (n - 1) / n`` of the bytes over each link (Patarasuk and Yuan, 2009). Pipeline: hidden states and
    residuals from each stage to the next (vLLM's ``IntermediateTensors``). Data parallel ranks with experts: each layer
    sends a token to the ranks of its experts and gets the results back, at most one copy for each expert or other rank,
    whichever are fewer, and to another host one copy for all ranks there, which pass it on (DeepEP's normal kernels).
    """
    tensor, stages, data = layout.tensor, layout.pipeline, layout.data
    token_bytes = ACTIVATION_BYTES * shape.hidden
    step_s = each_s = 0.0
    if tensor > 1:
        step_s += 2 * shape.layers * EXCHANGE_S
        each_s += 2 * shape.layers * token_bytes * 2 * (tensor - 1) / tensor / _link(tensor)
    if stages > 1:
        step_s += (stages - 1) * EXCHANGE_S
        each_s += (stages - 1) * 2 * token_bytes / _link(tensor * stages)
    if data > 1:
        hosts = -(-layout.gpus // HOST_GPUS)
        inside = min(data, HOST_GPUS, shape.experts_per_token + 1) - 1
        outside = min(hosts - 1, shape.experts_per_token)
        step_s += 2 * shape.layers * EXCHANGE_S
        each_s += 2 * shape.layers * token_bytes * max(inside / NVLINK_BYTES_PER_S, outside / NETWORK_BYTES_PER_S)
    return step_s, each_s


def kv_blocks_of(base: Profile, shape: Shape, layout: Layout) -> int:
    """KV blocks of one data parallel rank. Raises LayoutError where the weights leave no room.

    What a GPU keeps besides weights and KV is as in the profile's own layout. Tensor parallelism and stages divide
    weights and KV, but each rank has a KV head at least; data parallel ranks share out the experts, and each has its
    own copy of all other weights (vLLM's ``FusedMoEParallelConfig``).
    """
    block_bytes = base.block_tokens * base.kv_bytes_per_token
    own = Layout(tensor=shape.gpus)
    beside = GPU_BYTES - _weight_bytes(shape, own) - base.kv_blocks * block_bytes * _kv_share(shape, own)
    room = GPU_BYTES - beside - _weight_bytes(shape, layout)
    blocks = math.floor(room / (block_bytes * _kv_share(shape, layout)) + 1e-6)
    if blocks < 2:
        raise LayoutError(
            f"{layout}: each GPU would have {_weight_bytes(shape, layout) / 1e9:.0f} GB of weights, which leave no "
            "room for KV: take more GPUs"
        )
    return blocks


def _weight_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of weights on one GPU of the largest stage."""
    ranks = layout.tensor * layout.pipeline
    return ((shape.weight_bytes - shape.expert_bytes) / ranks + shape.expert_bytes / (ranks * layout.data)) * _uneven(
        shape, layout
    )


def _kv_share(shape: Shape, layout: Layout) -> float:
    """The share of a token's KV that one GPU of the largest stage keeps."""
    return _uneven(shape, layout) / (layout.pipeline * min(layout.tensor, shape.kv_heads))


def _uneven(shape: Shape, layout: Layout) -> float:
    """How much larger the largest stage is than all are on average."""
    return -(-shape.layers // layout.pipeline) * layout.pipeline / shape.layers


def _link(gpus: int) -> float:
    return NVLINK_BYTES_PER_S if gpus <= HOST_GPUS else NETWORK_BYTES_PER_S


def _check(shape: Shape, layout: Layout) -> None:
    if layout.pipeline > shape.layers:
        raise LayoutError(f"{layout}: the model has {shape.layers} layers, too few for {layout.pipeline} stages")
    if layout.data > 1 and not shape.expert_bytes:
        raise LayoutError(
            f"{layout}: the model has no experts to share out, so its data parallel ranks are workers by themselves: "
            f"leave out DP {layout.data}, the plan finds how many workers are needed"
        )
