"""Boundaries of a prompt: numbers of tokens after which a reader can continue, because every KV cache group of the
engine has what it needs there. Full attention needs the blocks of all tokens, a window those of the last tokens, a
recurrent state one block with the state after exactly so many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from connector.holder.leases import FollowedPrompt, LeaseTable
from connector.holder.pending_writes import PendingWrites
from shared.contracts.kv_exchange import KvGroup, KvGroupKind, NoGrant

TRIED_MAX = 5
"""Boundaries that are tried for a lease, the longest first: blocks of one may still be written, or be too many."""
ORDER = (KvGroupKind.FULL, KvGroupKind.WINDOW, KvGroupKind.STATE)
"""Order of the blocks of a lease: they are freed from the last one on, and the pool evicts in the order of freeing."""


class Part(NamedTuple):
    """Consecutive blocks of a prompt in one group."""

    first: int
    """Index in the prompt of the first one, in blocks of the group."""
    blocks: Sequence[Any]


FindBoundary = Callable[[list[bytes], int], tuple[Sequence[Part], int]]
"""The engine's lookup in its prefix cache: the longest boundary, of at most so many tokens, of a prompt with these
hashes, and the blocks that each group needs there, as if the prompt began with the first hash. 0: there is none.
"""


class CachedBlocks(Protocol):
    """The part of a block pool that is used here. A block of a state has vLLM's ``ref_cnt``."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV cache groups of an engine and their units, as in ``KvHandshake``."""

    groups: Sequence[KvGroup]
    hash_block_size: int
    alignment: int

    @property
    def is_dense(self) -> bool:
        """Whether every end of a block is a boundary: the only group has full attention."""
        return len(self.groups) == 1 and self.groups[0].kind is KvGroupKind.FULL

    def lent_hashes(self, prompt_tokens: int) -> int:
        """How many hashes of a prompt name what can be lent of it. A reader computes at least the last token, to which
        it could not return from a boundary at the end.
        """
        tokens = prompt_tokens if self.is_dense else max(0, prompt_tokens - 1)
        return tokens // self.alignment * self.alignment // self.hash_block_size

    @property
    def full(self) -> list[int]:
        """The groups with full attention, if their blocks have equally many tokens. Otherwise none: their blocks are
        granted with the others'.
        """
        full = [number for number, group in enumerate(self.groups) if group.kind is KvGroupKind.FULL]
        return full if len({self.groups[number].block_size for number in full}) == 1 else []

    @property
    def order(self) -> list[int]:
        """The groups in ``ORDER``."""
        return sorted(range(len(self.groups)), key=lambda number: ORDER.index(self.groups[number].kind))


def one_group(block_size: int) -> Groups:
    """The only group of a model has full attention."""
    return Groups([KvGroup(kind=KvGroupKind.FULL, block_size=block_size)], block_size, block_size)


def needed(group: KvGroup, boundary: int) -> range:
    """Indices of the blocks that a group needs at a boundary."""
    end = -(-boundary // group.block_size)
    if group.kind is KvGroupKind.WINDOW:
        return range(max(0, boundary - group.window + 1) // group.block_size, end)
    return range(end - 1 if group.kind is KvGroupKind.STATE else 0, end)


class Boundaries:
    """Finds the boundaries that an engine can lend, and the blocks to pin for them."""

    def __init__(
        self, groups: Groups, pool: CachedBlocks, find: FindBoundary, leases: LeaseTable, pending_writes: PendingWrites
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
        unit = self._groups.hash_block_size
        begin, most = prompt.first * unit, len(prompt.hashes) * unit
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
        unit = self._groups.hash_block_size
        parts = []
        for number, (group, part) in enumerate(zip(self._groups.groups, found, strict=True)):
            begin, indices = prompt.first * unit // group.block_size, needed(group, boundary)
            if group.kind is KvGroupKind.FULL:
                indices = range(min(prompt.full_tokens // group.block_size, indices.stop), indices.stop)
            elif indices.start < begin:
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
        if full := self._groups.full:
            first, blocks = parts[full[0]]
            fitting = first + max(0, len(blocks) - -(-excess // len(full)))
            lower = min(lower, fitting * self._groups.groups[full[0]].block_size)
        return lower, NoGrant.FULL

    def _is_written(self, block: Any, own: Collection[int]) -> bool:
        """Whether another request than the ended one holds the block."""
        return bool(block.ref_cnt > self._leases.pins_of(block.block_id) + (block.block_id in own))
