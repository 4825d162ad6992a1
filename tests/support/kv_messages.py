"""The blocks of grants and offers of models with one KV cache group."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.kv_exchange import GroupBlocks, KvGrant, KvOffer, pack_block_ids, unpack_block_ids


def one_group(block_ids: Iterable[int], first: int = 0) -> list[GroupBlocks]:
    """These blocks of a prompt, from index ``first`` on."""
    return [GroupBlocks(first=first, block_ids=pack_block_ids(block_ids))]


def blocks_of(message: KvGrant | KvOffer) -> list[int]:
    return [block_id for group in message.groups for block_id in unpack_block_ids(group.block_ids)]


def first_of(grant: KvGrant) -> int:
    """Index in the prompt of the first block of a grant that has blocks."""
    (group,) = grant.groups
    return group.first
