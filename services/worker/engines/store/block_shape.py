"""How a store keeps a block: its layers one behind the other, so that it is one piece of memory and of a file.

Which layers, planes and heads, it takes from the first worker that it meets; whether blocks mean the same there is said
by the fingerprint.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from connector.layout.compatibility import PROTOCOL_VERSION, why_malformed
from shared.contracts.kv_handshake import KvHandshake, KvLayer, KvPlane

BLOCK_BYTES_COUNTED_MIN = 16 * 1024
"""A block takes as much of the memory that a store was given, at least: simulated ones are a few bytes long, and a
million of them would be a burden all the same.
"""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Of one block, whole: all heads of all layers."""

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
        """How many blocks so many bytes hold."""
        return size // max(self.block_bytes, BLOCK_BYTES_COUNTED_MIN)

    def at(self, base: int) -> list[KvLayer]:
        """Where the layers of blocks are that lie one behind the other from ``base`` on."""
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
        """32 bytes that differ for blocks which do not mean the same."""
        return hashlib.sha256(
            repr((PROTOCOL_VERSION, self.fingerprint, self.block_tokens, self.kv_heads, self.layers)).encode()
        ).digest()


def shape_of(handshake: KvHandshake) -> BlockShape:
    """What a worker's blocks look like. Raises ValueError when its handshake makes no sense."""
    if why := why_malformed(handshake):
        raise ValueError(why)
    planes = tuple(tuple(plane.head_bytes for plane in layer.planes) for layer in handshake.ranks[0].layers)
    shape = BlockShape(handshake.fingerprint, handshake.block_size, handshake.kv_heads, planes)
    if shape.block_bytes <= 0 or handshake.block_size <= 0:
        raise ValueError("its blocks have no bytes")
    return shape
