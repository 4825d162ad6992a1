"""Bounds on a handshake's numbers, which a peer chooses: what is within them can be computed with and given to NIXL."""

from __future__ import annotations

import math

from shared.contracts.kv_exchange import (
    BLOCK_ID_BYTES,
    KV_DEVICES,
    KV_GROUPS_MAX,
    PROMPT_TOKENS_MAX,
    KvGroup,
    KvGroupKind,
    KvHandshake,
    KvLayer,
    KvPlane,
    KvRank,
)

EPOCH_END = 1 << 53
BLOCKS_END = 1 << 8 * BLOCK_ID_BYTES
BLOCK_TOKENS_MAX = 1 << 20
KV_HEADS_MAX = 1 << 16
RANKS_MAX = 1024
LAYERS_MAX = 4096
LAYER_NAME_MAX = 512
PLANES_MAX = 4096
"""A layer has keys and values of each of the kernel blocks in a block."""
AGENT_BYTES_MAX = 1 << 20
"""NIXL's metadata of a rank, which has some hundred bytes for each region of memory and network device."""
DEVICE_IDS_MAX = 1024
ADDRESS_END = 1 << 63
"""No address space of a process reaches it, and what lies before it can be added to in 64 bits."""


def why_out_of_bounds(peer: KvHandshake) -> str:
    """The first field of a handshake that is out of its bounds, with them; empty if none is."""
    return (
        _why_not_in("epoch", peer.epoch, 0, EPOCH_END - 1)
        or ("" if math.isfinite(peer.clock_s) else f"clock_s is {peer.clock_s}, no time")
        or _why_not_in("hash_block_size", peer.hash_block_size, 1, BLOCK_TOKENS_MAX)
        or _why_not_in("alignment", peer.alignment, peer.hash_block_size, BLOCK_TOKENS_MAX)
        or _why_not_in("beyond", peer.beyond, 0, BLOCK_TOKENS_MAX)
        or _why_not_in("the number of groups", len(peer.groups), 1, KV_GROUPS_MAX)
        or next(filter(None, map(_of_group, peer.groups)), "")
        or _why_not_in("blocks", peer.blocks, 1, BLOCKS_END - 1)
        or _why_not_in("the number of ranks", len(peer.ranks), 0, RANKS_MAX)
        or next(filter(None, (_of_rank(rank, peer) for rank in peer.ranks)), "")
    )


def _of_group(group: KvGroup) -> str:
    windows = (1, PROMPT_TOKENS_MAX) if group.kind is KvGroupKind.WINDOW else (0, 0)
    return _why_not_in("block_size", group.block_size, 1, BLOCK_TOKENS_MAX) or _why_not_in(
        "window", group.window, *windows
    )


def _of_rank(rank: KvRank, peer: KvHandshake) -> str:
    if rank.device not in KV_DEVICES:
        return f"device is {rank.device[:32]!r}, not {' or '.join(KV_DEVICES)}"
    return (
        _why_not_in("rank", rank.rank, 0, RANKS_MAX - 1)
        or _why_not_in("device_id", rank.device_id, 0, DEVICE_IDS_MAX)
        or _why_not_in("the length of agent", len(rank.agent), 0, AGENT_BYTES_MAX)
        or _why_not_in("the number of layers", len(rank.layers), 1, LAYERS_MAX)
        or next(filter(None, (_of_layer(layer, peer) for layer in rank.layers)), "")
    )


def _of_layer(layer: KvLayer, peer: KvHandshake) -> str:
    return (
        _why_not_in("the length of a layer's name", len(layer.name), 1, LAYER_NAME_MAX)
        or _why_not_in("group", layer.group, 0, len(peer.groups) - 1)
        or _why_not_in("base", layer.base, 1, ADDRESS_END - 1)
        or _why_not_in("block_stride", layer.block_stride, 1, ADDRESS_END - 1)
        or _why_not_in("the number of planes", len(layer.planes), 1, PLANES_MAX)
        or next(filter(None, (_of_plane(plane, layer, peer.blocks) for plane in layer.planes)), "")
    )


def _of_plane(plane: KvPlane, layer: KvLayer, blocks: int) -> str:
    size = plane.heads * plane.head_bytes
    last_block = layer.base + (blocks - 1) * layer.block_stride
    return (
        _why_not_in("offset", plane.offset, 0, ADDRESS_END - 1)
        or _why_not_in("head_bytes", plane.head_bytes, 1, ADDRESS_END - 1)
        or _why_not_in("heads", plane.heads, 1, KV_HEADS_MAX)
        or _why_not_in("total", plane.total, 1, KV_HEADS_MAX)
        or _why_not_in("block_stride", layer.block_stride, size, ADDRESS_END - 1)
        or _why_not_in("the end of the last block", last_block + plane.offset + size, 1, ADDRESS_END)
    )


def _why_not_in(name: str, value: int, least: int, most: int) -> str:
    return "" if least <= value <= most else f"{name} is {value}, not from {least} to {most}"
