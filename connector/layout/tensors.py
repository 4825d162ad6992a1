"""The memory layout of KV cache tensors, the KV heads of each rank, and whether two engines may exchange blocks.

Dimensions of a tensor are named by letters: B blocks, H heads, N tokens of a block, C the content of one token and
head, K keys and values where they are separate. Within a block, each head must be contiguous and heads must be
adjacent: then any range of heads is contiguous and can be read in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from connector.layout.bounds import why_out_of_bounds
from shared.contracts.kv_exchange import KvHandshake, KvLayer, KvPlane, KvRank

PROTOCOL_VERSION = 2
"""Version of handshakes, orders and the meaning of a block's bytes. Engines of different versions exchange nothing."""
HOW_TO_FIX = "leave VLLM_KV_CACHE_LAYOUT unset, or set it to HND"

SAME_UNITS = "; give both engines the same --block-size and --prefix-match-unit"
MUST_BE_EQUAL = {
    "version": "",
    "fingerprint": "",
    "hash_block_size": SAME_UNITS,
    "alignment": SAME_UNITS,
    "groups": SAME_UNITS,
    "beyond": "; give both engines the same --speculative-config",
}
"""Fields of two handshakes, with what to do where they differ."""


class UnsupportedLayout(ValueError):
    """Ranges of heads cannot be read from this layout; the message names the layer and the reason."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One layer's KV cache in memory. Strides are in bytes."""

    name: str
    group: int
    address: int
    dims: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def size(self, dim: str) -> int:
        """Length of the dimension; 1 if the tensor does not have it."""
        return self.shape[self.dims.index(dim)] if dim in self.dims else 1

    def stride(self, dim: str) -> int:
        return self.strides[self.dims.index(dim)] if dim in self.dims else 0


def layer_of(tensor: CacheTensor, blocks: int, kv_heads: int) -> KvLayer:
    """Addresses of the layer's blocks. ``kv_heads``: of the whole model. Raises UnsupportedLayout."""
    head_bytes = head_bytes_of(tensor)
    pieces = pieces_per_block(tensor, blocks)
    offsets = [
        plane * tensor.stride("K") + piece * tensor.stride("B")
        for plane in range(tensor.size("K"))
        for piece in range(pieces)
    ]
    planes = [
        KvPlane(offset=offset, head_bytes=head_bytes, heads=tensor.size("H"), total=kv_heads) for offset in offsets
    ]
    return KvLayer(
        name=tensor.name,
        group=tensor.group,
        base=tensor.address,
        block_stride=pieces * tensor.stride("B"),
        planes=planes,
    )


def head_bytes_of(tensor: CacheTensor) -> int:
    """Bytes of one head of a block. Raises UnsupportedLayout if a head is not contiguous or heads are not adjacent."""
    content = tensor.size("C") * tensor.itemsize
    head_bytes = tensor.size("N") * content
    apart = (
        _strides_apart(tensor, "C", tensor.itemsize)
        or _strides_apart(tensor, "N", content)
        or _strides_apart(tensor, "H", head_bytes)
    )
    if apart:
        raise UnsupportedLayout(
            f"the KV cache of {tensor.name} ({tensor.dims} {tensor.shape}, strides of {tensor.strides} bytes) does not"
            f" store the heads of a block contiguously and adjacently: {apart}. A range of heads cannot be read then;"
            f" {HOW_TO_FIX}"
        )
    return head_bytes


def _strides_apart(tensor: CacheTensor, dim: str, expected: int) -> str:
    if tensor.size(dim) == 1 or tensor.stride(dim) == expected:
        return ""
    return f"{dim} steps by {tensor.stride(dim)} bytes where {expected} were expected"


def pieces_per_block(tensor: CacheTensor, blocks: int) -> int:
    """Kernel blocks in each block of the scheduler. Raises UnsupportedLayout if that is not a whole number."""
    if tensor.size("B") < blocks or tensor.size("B") % blocks:
        raise UnsupportedLayout(f"the KV cache of {tensor.name} has {tensor.size('B')} blocks, no multiple of {blocks}")
    return tensor.size("B") // blocks


def heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    """The model's heads that a tensor-parallel rank holds. If ranks outnumber heads, several ranks hold the same head.

    A latent cache counts as one head, which every rank holds. Raises UnsupportedLayout if heads do not divide evenly.
    """
    if kv_heads % ranks == 0:
        share = kv_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % kv_heads == 0:
        head = rank // (ranks // kv_heads)
        return range(head, head + 1)
    raise UnsupportedLayout(f"{kv_heads} KV heads do not divide over {ranks} tensor-parallel ranks")


def why_not(own: KvHandshake, peer: KvHandshake, *, is_whole: bool = True) -> str:
    """Why blocks of ``peer`` must not be read into ``own``; empty if they may be read. ``is_whole``: ``own`` lists all
    ranks of its engine, not one alone, which may lack the layers of other pipeline stages.
    """
    for name, remedy in MUST_BE_EQUAL.items():
        ours, theirs = getattr(own, name), getattr(peer, name)
        if ours != theirs:
            return f"{name} differs: {_text(ours)} here, {_text(theirs)} there{remedy}"
    if why := why_malformed(peer):
        return why
    ours, theirs = contents_of(own.ranks), contents_of(peer.ranks)
    if is_whole and len(ours) != len(theirs):
        return f"layers differ: {len(ours)} here, {len(theirs)} there"
    return _why_layers_differ(ours, theirs)


def _text(value: object) -> str:
    """Groups in words, everything else as it is."""
    if not isinstance(value, list):
        return repr(value)
    return ", ".join(
        f"{group.kind} in blocks of {group.block_size} tokens" + (f" (of {group.window})" if group.window else "")
        for group in value
    )


def why_malformed(peer: KvHandshake) -> str:
    """Why a number of a handshake is out of bounds, or its ranks contradict their number or the model's heads; empty if
    neither is so.
    """
    if why := why_out_of_bounds(peer):
        return why
    stages, shape = stages_of(peer), [(rank.stage, rank.rank) for rank in peer.ranks]
    if not shape or shape != [(stage, rank) for stage in range(len(stages)) for rank in range(len(stages[0]))]:
        return f"(stage, rank) of the ranks are {shape}, not all of each stage in their order"
    known: set[str] = set()
    for stage in stages:
        if why := next(filter(None, (_why_rank_differs(rank, stage) for rank in stage)), ""):
            return why
        names = set(contents_of(stage[:1]))
        if twice := names & known:
            return f"layer {min(twice)} is in two stages"
        known |= names
    return ""


def stages_of(handshake: KvHandshake) -> list[list[KvRank]]:
    """The ranks of each pipeline stage: as many as there are of the first one."""
    size = max(1, sum(rank.stage == 0 for rank in handshake.ranks))
    return [handshake.ranks[first : first + size] for first in range(0, len(handshake.ranks), size)]


def _why_rank_differs(rank: KvRank, stage: list[KvRank]) -> str:
    """Why a rank contradicts the number of ranks, the model's heads, or the first rank of its stage; empty if not."""
    if why := _why_heads_differ(rank, len(stage)):
        return why
    if len(contents_of([rank])) < len(rank.layers):
        return f"rank {rank.rank} has two layers of one name"
    if contents_of([rank]) != contents_of(stage[:1]):
        return f"rank {rank.rank} has other layers than rank 0"
    return ""


def _why_heads_differ(rank: KvRank, ranks: int) -> str:
    """Why the heads of some plane are not those of this rank; empty if they are."""
    try:
        shares = {total: len(heads_of(rank.rank, ranks, total)) for total in totals_of(rank)}
    except UnsupportedLayout as unsupported:
        return str(unsupported)
    for layer in rank.layers:
        for plane in layer.planes:
            if plane.heads != shares[plane.total]:
                return f"rank {rank.rank} does not hold {shares[plane.total]} of {plane.total} KV heads in each plane"
    return ""


def totals_of(rank: KvRank) -> set[int]:
    """The numbers of heads that planes have in the whole model."""
    return {plane.total for layer in rank.layers for plane in layer.planes}


def _why_layers_differ(ours: Mapping[str, Content], theirs: Mapping[str, Content]) -> str:
    """Why layers of one name differ, or are not there; empty if neither is so."""
    for name, content in ours.items():
        if name not in theirs:
            return f"layers differ: {name} is not there"
        if content != theirs[name]:
            differs = (
                f"layer {name} differs: group, and bytes and number of heads: {content} here, {theirs[name]} there"
            )
            return f"{differs}; give both engines the same --tensor-parallel-size and data types"
    return ""


Content = tuple[int, tuple[tuple[int, int], ...]]
"""A layer's group, and for each plane the bytes of a head and the heads of the whole model."""


def by_numbers(name: str) -> list[int | str]:
    """Sort key of layers, with ``layers.10`` after ``layers.2``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def contents_of(ranks: Iterable[KvRank]) -> dict[str, Content]:
    """The content of each layer by name."""
    return {
        layer.name: (layer.group, tuple((plane.head_bytes, plane.total) for plane in layer.planes))
        for rank in ranks
        for layer in rank.layers
    }
