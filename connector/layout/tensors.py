"""Where a KV cache tensor keeps which head of which block, said in addresses, and which heads a rank owns.

The engine's tensors come with named dimensions: B blocks, H heads, N tokens of a block, C the content of one token and
head, K keys and values where they are apart. What can be exchanged is a layout in which, within a block, each head is
one piece of memory and heads follow one another: then any range of heads is one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.kv_handshake import KvHandshake, KvLayer, KvPlane, KvRank

HOW_TO_MEND = "leave VLLM_KV_CACHE_LAYOUT unset, or set it to HND"


class UnsupportedLayout(ValueError):
    """Blocks cannot be read by heads; the message says of what, and why."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One layer's KV cache as it lies in memory. Strides are in bytes."""

    name: str
    address: int
    dims: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def size(self, dim: str) -> int:
        """How many there are of it; one of what the tensor has not."""
        return self.shape[self.dims.index(dim)] if dim in self.dims else 1

    def stride(self, dim: str) -> int:
        return self.strides[self.dims.index(dim)] if dim in self.dims else 0


def layer_of(tensor: CacheTensor, blocks: int) -> KvLayer:
    """Where each block of the layer is. Raises UnsupportedLayout."""
    head_bytes = head_bytes_of(tensor)
    pieces = pieces_per_block(tensor, blocks)
    offsets = [
        plane * tensor.stride("K") + piece * tensor.stride("B")
        for plane in range(tensor.size("K"))
        for piece in range(pieces)
    ]
    planes = [KvPlane(offset=offset, head_bytes=head_bytes, heads=tensor.size("H")) for offset in offsets]
    return KvLayer(base=tensor.address, block_stride=pieces * tensor.stride("B"), planes=planes)


def head_bytes_of(tensor: CacheTensor) -> int:
    """The length of one head's piece. Raises UnsupportedLayout when a head is not in one piece, or heads lie apart."""
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
            f" keep each head of a block in one piece, head after head: {apart}. A range of heads can then not be read;"
            f" {HOW_TO_MEND}"
        )
    return head_bytes


def _strides_apart(tensor: CacheTensor, dim: str, expected: int) -> str:
    if tensor.size(dim) == 1 or tensor.stride(dim) == expected:
        return ""
    return f"{dim} steps by {tensor.stride(dim)} bytes where {expected} were expected"


def pieces_per_block(tensor: CacheTensor, blocks: int) -> int:
    """A block of the scheduler may be several of the kernel's. Raises UnsupportedLayout when it is no whole number."""
    if tensor.size("B") < blocks or tensor.size("B") % blocks:
        raise UnsupportedLayout(f"the KV cache of {tensor.name} has {tensor.size('B')} blocks, no multiple of {blocks}")
    return tensor.size("B") // blocks


def heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    """The heads of the model that a tensor-parallel rank holds; several ranks hold the same one when ranks are more.

    A latent cache counts as one head, which every rank holds. Raises UnsupportedLayout when it does not come out even.
    """
    if kv_heads % ranks == 0:
        share = kv_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % kv_heads == 0:
        head = rank // (ranks // kv_heads)
        return range(head, head + 1)
    raise UnsupportedLayout(f"{kv_heads} KV heads do not divide over {ranks} tensor-parallel ranks")


PROTOCOL_VERSION = 1
"""Of handshakes, orders and what a block's bytes are; engines with different ones exchange nothing."""


def why_not(own: KvHandshake, peer: KvHandshake) -> str:
    """Why blocks of ``peer`` must not be read into ``own``; empty when they may be."""
    for name in ("version", "fingerprint", "block_size", "kv_heads"):
        ours, theirs = getattr(own, name), getattr(peer, name)
        if ours != theirs:
            return f"{name} differs: {ours!r} here, {theirs!r} there"
    return why_malformed(peer) or why_layers_differ(own.ranks[0], peer.ranks[0])


def why_malformed(peer: KvHandshake) -> str:
    """A handshake whose ranks do not hold what their number and the model say is not acted upon."""
    if not peer.ranks or [rank.rank for rank in peer.ranks] != list(range(len(peer.ranks))):
        return f"ranks are {[rank.rank for rank in peer.ranks]}, not 0, 1, 2 …"
    for rank in peer.ranks:
        try:
            heads = len(heads_of(rank.rank, len(peer.ranks), peer.kv_heads))
        except UnsupportedLayout as unsupported:
            return str(unsupported)
        if any(plane.heads != heads for layer in rank.layers for plane in layer.planes):
            return f"rank {rank.rank} does not hold {heads} of {peer.kv_heads} KV heads in each plane"
        if shape_of(rank) != shape_of(peer.ranks[0]):
            return f"rank {rank.rank} has other layers than rank 0"
    return ""


def why_layers_differ(own: KvRank, peer: KvRank) -> str:
    """Layers are paired by number; each must be cut into the same planes of equally long heads."""
    ours, theirs = shape_of(own), shape_of(peer)
    if len(ours) != len(theirs):
        return f"layers differ: {len(ours)} here, {len(theirs)} there"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return f"layer {number} differs: planes of heads of {one} bytes here, {other} there"
    return ""


def shape_of(rank: KvRank) -> list[list[int]]:
    """For each layer, the length of a head in each plane."""
    return [[plane.head_bytes for plane in layer.planes] for layer in rank.layers]
