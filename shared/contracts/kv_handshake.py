"""What a reader must know of a holder before it can read: where the blocks are, and whether they mean the same here.

Asked for once for each pair of workers and epoch, and again every now and then for the clock.
"""

from __future__ import annotations

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message


class KvPlane(Message, frozen=True, kw_only=True):
    """Part of one block of one layer: consecutive heads of ``head_bytes`` each."""

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
    """The memory layout of a holder's blocks. A reader asks for it once per pair of workers and epoch, and repeatedly to
    follow the holder's clock.
    """

    worker_id: WorkerId
    epoch: Epoch
    version: int
    """Version of the connector's protocol."""
    fingerprint: str
    """``Fingerprint.key``: a reader refuses KV of another model, revision or layout."""
    clock_s: float
    """The holder's clock when it replied."""
    block_size: int
    """Tokens."""
    blocks: int
    kv_heads: int
    """KV heads of the whole model; 1 for a latent cache (MLA), of which every rank holds a full copy."""
    ranks: list[KvRank]


class AskKvHandshake(Message, frozen=True, kw_only=True):
    """Worker -> worker: requests a KvHandshake."""

    worker_id: WorkerId
    reader_id: WorkerId
