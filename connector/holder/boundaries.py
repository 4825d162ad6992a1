"""Boundaries that an engine can lend: its prefix cache has the blocks that each KV cache group needs there (see
``GroupPlan``), and no step still writes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from connector.groups import GroupPlan
from connector.holder.leases import FollowedPrompt, LeaseTable
from connector.holder.pending_writes import PendingWrites
from shared.contracts.kv_exchange import KvGroupKind, NoGrant

TRIED_MAX = 5
"""Boundaries that are tried for a lease, the longest first: blocks of one may still be written, or be too many."""


class Part(NamedTuple):
    """Consecutive blocks of a prompt in one group."""

    first: int
    """Index in the prompt of the first one, in blocks of the group."""
    blocks: Sequence[Any]


FindBoundary = Callable[[list[bytes], int], tuple[Sequence[Part], int]]
"""The engine's lookup in its prefix cache: the longest boundary, of at most so many tokens, of a prompt with these
hashes, and the blocks that each group needs there, as if the prompt began with the first hash. 0: there is none. An
engine with a drafter finds one only if the hashes go ``GroupPlan.beyond`` it.
"""


class CachedBlocks(Protocol):
    """The part of a block pool that is used here. A block of a state has vLLM's ``ref_cnt``."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...


class Boundaries:
    """Finds the boundaries that an engine can lend, and the blocks to pin for them."""

    def __init__(
        self,
        groups: GroupPlan,
        pool: CachedBlocks,
        find: FindBoundary,
        leases: LeaseTable,
        pending_writes: PendingWrites,
    ) -> None:
        self.find = find
        self._groups = groups
        self._pool = pool
        self._leases = leases
        self._is_pending = pending_writes.writes

    def longest(
        self, prompt: FollowedPrompt, *, least: int, tries: int, own: Collection[int] = ()
    ) -> tuple[Sequence[Part], int, NoGrant | None]:
        """The longest boundary, of at least so many tokens, at which all blocks may be pinned, and those of them that
        the reader lacks. 0: there is none, for this reason. ``own``: blocks of the ended request that has computed it.
        """
        unit = self._groups.unit
        begin = prompt.first * unit
        most = prompt.end - begin
        reason = NoGrant.NOT_HELD
        prompt.is_blocked = False
        for _time in range(max(1, tries)):
            if most <= 0:
                break
            found, tokens = self.find(prompt.hashes, most)
            boundary = begin + tokens
            if not tokens or boundary < least:
                break
            parts = self._lacking(prompt, found, boundary)
            if parts is None:
                most = tokens - self._groups.alignment
            elif (refusal := self._refusal(parts, boundary, own)) is not None:
                most, reason = refusal[0] - begin, refusal[1]
                prompt.is_blocked = tries > 0
            else:
                return parts, boundary, None
        return (), 0, reason

    def _lacking(self, prompt: FollowedPrompt, found: Sequence[Part], boundary: int) -> list[Part] | None:
        """What the reader lacks of the blocks that were found. None: a window needs earlier blocks than the engine does
        for its own requests, and they are not cached, or the reader has sent no hashes of them.
        """
        unit = self._groups.unit
        parts = []
        for number, (group, part) in enumerate(zip(self._groups.groups, found, strict=True)):
            begin = prompt.first * unit // group.block_size
            indices = self._groups.needed(number, prompt.full_tokens, boundary)
            if indices.start < begin and group.kind is not KvGroupKind.FULL:
                return None
            known = begin + part.first
            blocks = []
            for index in range(indices.start, min(known, indices.stop)):
                name = prompt.hashes[(index + 1) * group.block_size // unit - prompt.first - 1]
                if (cached := self._pool.get_cached_block(name, [number])) is None:
                    return None
                blocks += cached
            blocks += part.blocks[max(0, indices.start - known) : max(0, indices.stop - known)]
            parts.append(Part(indices.start, blocks))
        return parts

    def _refusal(self, parts: Sequence[Part], boundary: int, own: Collection[int]) -> tuple[int, NoGrant] | None:
        """Why the blocks may not be pinned, and the most tokens of a boundary that may; None: they may.

        A request goes on writing into the block of its running state, though that is in the cache under a hash inside
        the block, until a step has copied it. The state at the end of a block is never written again.
        """
        lower = boundary - self._groups.alignment
        for group, part in zip(self._groups.groups, parts, strict=True):
            is_inside = group.kind is KvGroupKind.STATE and boundary % group.block_size
            for index, block in enumerate(part.blocks, part.first):
                if self._is_pending(block.block_id) or (is_inside and self._is_written(block, own)):
                    begin = index * group.block_size if group.kind is KvGroupKind.FULL else lower
                    return min(lower, begin), NoGrant.NOT_HELD
        wanted = [block.block_id for number in self._groups.order for block in parts[number].blocks]
        excess = len(wanted) - self._leases.pinnable(wanted)
        if not excess:
            return None
        if full := self._groups.ahead:
            first, blocks = parts[full[0]]
            fitting = first + max(0, len(blocks) - -(-excess // len(full)))
            lower = min(lower, fitting * self._groups.groups[full[0]].block_size)
        return lower, NoGrant.FULL

    def _is_written(self, block: Any, own: Collection[int]) -> bool:
        """Whether another request than the ended one holds the block."""
        return bool(block.ref_cnt > self._leases.pins_of(block.block_id) + (block.block_id in own))
