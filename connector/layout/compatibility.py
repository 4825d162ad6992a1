"""Whether one engine's KV means the same to another, read byte for byte."""

from __future__ import annotations

from connector.layout.tensors import UnsupportedLayout, heads_of
from shared.contracts.kv_handshake import KvHandshake, KvRank

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
