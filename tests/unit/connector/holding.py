"""A holder over vLLM's block pool, with a manual clock."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from connector.groups import full_attention
from connector.holder.holder import Holder, HolderSettings
from shared.contracts.kv_exchange import KvOffer, LeaseKv, ReleaseKv, pack_full_hashes

BLOCK_TOKENS = 16
ME = {"worker_id": "prefill-1", "epoch": 7}


def chain(blocks: int, prompt: str = "a prompt") -> list[bytes]:
    """Full hashes of a prompt's blocks."""
    return [hashlib.sha256(f"{prompt} {index}".encode()).digest() for index in range(blocks)]


def lease_request(hashes: list[bytes], ask_id: str = "ask-1", **fields) -> LeaseKv:
    known = {**ME, "reader_id": "decode-1", "hold_s": 5.0} | fields
    return LeaseKv(ask_id=ask_id, hashes=pack_full_hashes(hashes), **known)


def release(ask_id: str = "", lease_id: str = "", **fields) -> ReleaseKv:
    known = {**ME, "reader_id": "decode-1"} | fields
    return ReleaseKv(ask_ids=[ask_id] if ask_id else [], lease_ids=[lease_id] if lease_id else [], **known)


class Step:
    """A step of vLLM's scheduler, of which the holder sees only the identity."""


class Holding:
    """The holder, its block pool, and the scheduler operations that the holder observes."""

    def __init__(self, blocks: int = 64, **settings) -> None:
        pool_module = pytest.importorskip("vllm.v1.core.block_pool")
        self.now = 100.0
        self.pool = pool_module.BlockPool(blocks, True, BLOCK_TOKENS)
        self.free_at_first = self.pool.get_num_free_blocks()
        self.holder = Holder(HolderSettings(**ME, **settings), lambda: self.now)
        self.holder.bind(self.pool, full_attention(BLOCK_TOKENS))
        self.holder.watch(self.pool)

    def offer(self, hashes: list[bytes], block_ids: list[int], offer_id: str = "") -> KvOffer | None:
        """The request that has computed these blocks ends."""
        return self.holder.offer(hashes, len(hashes) * BLOCK_TOKENS, [block_ids], offer_id)

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def run(self, hashes: list[bytes]) -> list:
        """A request computes blocks with these hashes and keeps running."""
        blocks = self.pool.get_new_blocks(len(hashes))
        self.name(hashes, blocks, 0, len(hashes))
        return blocks

    def name(self, hashes: list[bytes], blocks: list, first: int, end: int) -> None:
        request = SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(request, blocks, first, end, BLOCK_TOKENS, 0)

    def schedule(self, hashes: list[bytes], blocks: list, first: int) -> Step:
        """A step that computes ``blocks`` from index ``first`` on is scheduled."""
        self.holder.begin_step()
        self.name(hashes, blocks, first, len(blocks))
        step = Step()
        self.holder.scheduled(step)
        return step

    def end(self, blocks: list) -> None:
        """The request that owns these blocks ends."""
        self.pool.free_blocks(reversed(blocks))

    def hold(self, hashes: list[bytes]) -> list[int]:
        """Put blocks with these hashes into the prefix cache, used by no request."""
        blocks = self.run(hashes)
        self.end(blocks)
        return [block.block_id for block in blocks]

    def allocate_all_free(self) -> list:
        """A request allocates all free blocks, which evicts every cached block that is not pinned."""
        return self.pool.get_new_blocks(self.free)
