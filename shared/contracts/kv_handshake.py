"""What a reader must know of a holder before it can read: where the blocks are, and whether they mean the same here.

Asked for once for each pair of workers and epoch, and again every now and then for the clock.
"""

from __future__ import annotations

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message


class KvPlane(Message, frozen=True, kw_only=True):
    """Within one block of one layer: heads one behind the other, each ``head_bytes`` long."""

    offset: int
    head_bytes: int
    heads: int


class KvLayer(Message, frozen=True, kw_only=True):
    """One layer's blocks in one rank's memory."""

    base: int
    """Address of block 0."""
    block_stride: int
    """Bytes from one block to the next."""
    planes: list[KvPlane]


class KvRank(Message, frozen=True, kw_only=True):
    """One tensor-parallel rank of an engine."""

    rank: int
    agent: bytes
    """NIXL agent metadata."""
    device: str
    """cpu or cuda."""
    device_id: int
    layers: list[KvLayer]


class KvHandshake(Message, frozen=True, kw_only=True):
    """All that a reader needs to read a holder's blocks."""

    worker_id: WorkerId
    epoch: Epoch
    version: int
    """Of the connector's protocol."""
    fingerprint: str
    """``Fingerprint.key``: KV of another model, revision or layout is never read."""
    clock_s: float
    """The holder's clock when it answered."""
    block_size: int
    """Tokens."""
    blocks: int
    kv_heads: int
    """Of the whole model; a latent cache (MLA), which every rank holds whole, has one."""
    ranks: list[KvRank]


class AskKvHandshake(Message, frozen=True, kw_only=True):
    """Worker -> worker: describe yourself. Answered with KvHandshake."""

    worker_id: WorkerId
    reader_id: WorkerId
