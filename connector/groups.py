"""Which blocks of each KV cache group an engine needs to continue a prompt, and whether a grant has them.

A full-attention layer needs the blocks of all tokens before the boundary, a layer with a window those of its last
tokens, a recurrent layer the one block with the state after them. Only at a boundary can a request continue. Positions
are in tokens from the start of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from shared.contracts.kv_exchange import GroupBlocks, KvGroup, KvGroupKind, unpack_block_ids

ORDER = (KvGroupKind.FULL, KvGroupKind.WINDOW, KvGroupKind.STATE)
"""Order of the blocks of a lease: they are freed from the last one on, and the pool evicts in the order of freeing."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of a prompt in one group."""

    group: int
    first: int
    """Index in the prompt of the first one, in blocks of the group."""
    ids: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.ids)

    def within(self, first: int, end: int) -> Blocks:
        """Those of them from ``first`` up to, not including, ``end``."""
        first, end = max(first, self.first), min(end, self.end)
        return Blocks(self.group, first, self.ids[first - self.first : max(first, end) - self.first])


class GroupPlan:
    """The groups of one engine. A peer's are equal: the handshake compares them."""

    def __init__(self, groups: Sequence[KvGroup], unit: int, alignment: int, *, beyond: int = 0) -> None:
        """``unit``: ``KvHandshake.hash_block_size``. ``alignment``: boundaries are its multiples. ``beyond``: so many
        tokens beyond a boundary must be cached, too, in an engine with a drafter: what that computes for a token
        depends on the next one, so vLLM finds a prefix and drops its end.
        """
        self.groups = groups
        self.unit = unit
        self.alignment = alignment
        self.full = [number for number, group in enumerate(groups) if group.kind is KvGroupKind.FULL]
        """Numbers of the groups with full attention."""
        self.keeps_prefix = self.full == [0] and len(groups) == 1
        """Each prefix of the blocks is of use. Otherwise a prompt continues at a boundary only, for which each group
        must have what it needs.
        """
        self.ahead = self.full if len({groups[number].block_size for number in self.full}) == 1 else []
        """Numbers of the groups whose blocks are granted ahead of a boundary: those with full attention, if the blocks
        of these have equally many tokens. Otherwise none: full attention is granted with the others.
        """
        self.order = sorted(range(len(groups)), key=lambda number: ORDER.index(groups[number].kind))
        """Numbers of the groups in ``ORDER``."""
        self.stride = lcm(*(groups[number].block_size for number in self.full)) if self.full else alignment
        """``KvSource.first`` and ``end`` count blocks of so many tokens."""
        self._all = lcm(*(group.block_size for group in groups))
        self._widest = max((group.window for group in groups), default=0)
        self.beyond = beyond

    def last_boundary(self, tokens: int) -> int:
        """How many tokens of a prompt another engine's KV may replace. Never all if a prompt continues at a boundary
        only: the reader computes at least the last token, and could not return to it from a boundary at the end.
        """
        if self.keeps_prefix:
            return self.cut(tokens)
        return self.cut(max(0, min(tokens - 1, tokens // self.unit * self.unit - self.beyond)))

    def cut(self, tokens: int) -> int:
        """The last position up to ``tokens`` at which the KV that comes may end."""
        step = self.unit if self.keeps_prefix else self.alignment
        return tokens // step * step

    def hashes_from(self, have: int) -> int:
        """Index of the first hash of a lease request: what a window needs may begin before ``have``, and a state at
        ``have`` has the hash before it.
        """
        start = have if self.keeps_prefix else max(0, have - max(self._widest - 1, 1)) // self._all * self._all
        return start // self.unit

    def needed(self, number: int, have: int, boundary: int) -> range:
        """Indices of a group's blocks with which a reader that has full attention for ``have`` tokens continues at the
        boundary.
        """
        group = self.groups[number]
        size = group.block_size
        end = -(-boundary // size)
        if group.kind is KvGroupKind.FULL:
            return range(min(have // size, end), end)
        if group.kind is KvGroupKind.WINDOW:
            return range(max(0, boundary - group.window + 1) // size, end)
        return range(max(0, end - 1), end)

    def sizes(self, block_bytes: Sequence[int]) -> tuple[int, int]:
        """Bytes of full attention for each token, and those of the other groups at a boundary behind the widest window
        at which a block of each group ends. ``block_bytes``: of a block of each group.
        """
        others = [number for number in range(len(self.groups)) if number not in self.full]
        far = (self._widest // self._all + 1) * self._all
        token = sum(block_bytes[number] // self.groups[number].block_size for number in self.full)
        return token, sum(block_bytes[number] * len(self.needed(number, 0, far)) for number in others)

    def name_of(self, hashes: Sequence[bytes], number: int, index: int, boundary: int) -> bytes:
        """Hash of a group's block, of which only what precedes the boundary counts."""
        end = min((index + 1) * self.groups[number].block_size, boundary)
        return hashes[end // self.unit - 1]

    def is_named(self, hashes: Sequence[bytes], position: int, last_hash: bytes) -> bool:
        """Whether a prompt with these hashes has this one up to the position."""
        index, rest = divmod(position, self.unit)
        return not rest and 0 < index <= len(hashes) and hashes[index - 1] == last_hash

    def granted(self, groups: Sequence[GroupBlocks], have: int, boundary: int) -> tuple[list[Blocks], int] | None:
        """The blocks of a sound grant or offer, and the position up to which it has full attention; None if it is not
        what was asked for: blocks from ``have`` on up to the boundary or, without one, of full attention only.
        """
        if not groups:
            return [], have
        if len(groups) != len(self.groups):
            return None
        blocks = [Blocks(number, one.first, unpack_block_ids(one.block_ids)) for number, one in enumerate(groups)]
        if boundary and not self.keeps_prefix:
            wanted = [self.needed(number, have, boundary) for number in range(len(groups))]
            fits = boundary % self.alignment == 0 and all(map(_are, blocks, wanted))
            return (blocks, max(have, boundary)) if fits else None
        ends = {one.end * self.groups[one.group].block_size for one in blocks if one.ids}
        end = ends.pop() if ends else have
        wanted = [self._full_between(number, have, end) for number in range(len(groups))]
        fits = not ends and end % self.stride == 0 and boundary in (0, end) and all(map(_are, blocks, wanted))
        return (blocks, end) if fits else None

    def _full_between(self, number: int, have: int, end: int) -> range:
        size = self.groups[number].block_size
        return range(have // size, end // size) if number in self.full else range(0)


def full_attention(block_tokens: int) -> GroupPlan:
    """The plan of an engine whose layers all have full attention."""
    return GroupPlan([KvGroup(kind=KvGroupKind.FULL, block_size=block_tokens)], block_tokens, block_tokens)


def _are(blocks: Blocks, wanted: range) -> bool:
    return len(blocks.ids) == len(wanted) and (not wanted or blocks.first == wanted.start)
