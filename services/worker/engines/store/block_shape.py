"""The layout of a block in a store: its layers follow each other, so that a block is contiguous in memory and in a
file.

Layers, planes and heads are those of the first worker that the store meets. The fingerprint says whether another
worker's blocks have the same meaning.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from connector.layout.tensors import PROTOCOL_VERSION, why_malformed
from shared.contracts.kv_exchange import KvHandshake, KvLayer, KvPlane

BLOCK_BYTES_COUNTED_MIN = 16 * 1024
"""A block counts as at least this much of a store's memory: simulated blocks are a few bytes long, and the bookkeeping
of millions of them would take more.
"""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Of one block: all heads of all layers."""

    fingerprint: str
    block_tokens: int
    kv_heads: int
    layers: tuple[tuple[int, ...], ...]
    """For each layer, the length of one head in each of its planes."""

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return self.kv_heads * sum(map(sum, self.layers))

    def blocks_in(self, size: int) -> int:
        """How many blocks fit into ``size`` bytes."""
        return size // max(self.block_bytes, BLOCK_BYTES_COUNTED_MIN)

    def at(self, base: int) -> list[KvLayer]:
        """The layers of contiguous blocks that begin at ``base``."""
        layers: list[KvLayer] = []
        start = base
        for heads in self.layers:
            planes, offset = [], 0
            for head_bytes in heads:
                planes.append(KvPlane(offset=offset, head_bytes=head_bytes, heads=self.kv_heads))
                offset += head_bytes * self.kv_heads
            layers.append(KvLayer(base=start, block_stride=self.block_bytes, planes=planes))
            start += offset
        return layers

    def identity(self) -> bytes:
        """32 bytes that differ for blocks of different meaning."""
        return hashlib.sha256(
            repr((PROTOCOL_VERSION, self.fingerprint, self.block_tokens, self.kv_heads, self.layers)).encode()
        ).digest()


def shape_of(handshake: KvHandshake) -> BlockShape:
    """Of a worker's blocks. Raises ValueError for a malformed handshake."""
    if why := why_malformed(handshake):
        raise ValueError(why)
    planes = tuple(tuple(plane.head_bytes for plane in layer.planes) for layer in handshake.ranks[0].layers)
    shape = BlockShape(handshake.fingerprint, handshake.block_size, handshake.kv_heads, planes)
    if shape.block_bytes <= 0 or handshake.block_size <= 0:
        raise ValueError("its blocks have no bytes")
    return shape
