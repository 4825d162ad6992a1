"""Digests of this rank's own blocks, for the KV self-test: by layer and head, so that engines with other tensor and
pipeline parallelism have equal ones. A head's digest is of its bytes in plane after plane, block after block. A state
is digested as attention is: the parts of it that are cut over ranks are its heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from connector.layout.routes import ReaderRank
from connector.messages import BlocksDigested, DigestBlocks, HeadKey
from shared.contracts.kv_exchange import DIGEST_BYTES

ReadMemory = Callable[[int, int], bytes]
"""Returns bytes of the engine's KV memory, by address and length."""
read_cpu_memory: ReadMemory = ctypes.string_at


def digested(order: DigestBlocks, rank: ReaderRank, read_memory: ReadMemory) -> BlocksDigested:
    """The result has a ``failure`` if the memory cannot be read."""
    try:
        return BlocksDigested(order.digest_number, _by_head(rank, order.groups, read_memory))
    except (RuntimeError, ValueError) as error:  # Of a device; it must not end the thread that moves KV.
        return BlocksDigested(order.digest_number, {}, failure=f"the blocks cannot be read: {error}")


def _by_head(rank: ReaderRank, groups: Sequence[Sequence[int]], read_memory: ReadMemory) -> dict[HeadKey, bytes]:
    hashes: dict[HeadKey, Any] = {}
    for layer in rank.memory.layers:
        for plane in layer.planes:
            heads = rank.heads(plane.total)
            for block in groups[layer.group]:
                address = layer.base + plane.offset + block * layer.block_stride
                content = memoryview(read_memory(address, len(heads) * plane.head_bytes))
                for place, head in enumerate(heads):
                    key = (layer.group, layer.name, plane.total, head)
                    one = hashes.setdefault(key, blake2b(digest_size=DIGEST_BYTES))
                    one.update(content[place * plane.head_bytes : (place + 1) * plane.head_bytes])
    return {key: one.digest() for key, one in hashes.items()}
