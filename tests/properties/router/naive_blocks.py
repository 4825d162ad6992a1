"""The block table as plainly as it can be said, and the tables that are compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from services.router.state.block_table import (
    BOUNDARY,
    IS_COMPILED,
    LOST_MAX,
    TIERS,
    BlockTable,
    Boundaries,
    PythonBlockTable,
    block_table,
)
from shared.contracts.kv_events import MEMORIES, NARROW_MARK, digest_xor, unpack_hashes

TABLES = [
    pytest.param(PythonBlockTable, id="python"),
    pytest.param(block_table, id="native", marks=pytest.mark.skipif(not IS_COMPILED, reason="not built here")),
]


KINDS = (
    Boundaries(1),
    Boundaries(3),
    Boundaries(2, 3, 3),
    Boundaries(0, 2, 2),
    Boundaries(1, 4, 4),
    Boundaries(1, 1, 1, 3),
    Boundaries(2, 2, 1, 3),
    Boundaries(0, 4, 2, 2),
    Boundaries(1, 1, 1, 3, 1, 1),
    Boundaries(2, 2, 1, 3, 2, 1),
    Boundaries(1, 2, 2, 2, 1, 2),
    Boundaries(1, 2, 1, 2, 1, 0),
    Boundaries(0, 2, 2, 2, 0, 2),
    Boundaries(1, 1, 1, 3, narrow=True),
    Boundaries(2, 2, 1, 3, 2, 1, narrow=True),
    Boundaries(0, 2, 2, 2, narrow=True),
    Boundaries(2, 2, 1, 4, 2, 1, short=2),
    Boundaries(1, 4, 2, 3, 1, 2, short=4),
    Boundaries(200),
    Boundaries(0, 200),
    Boundaries(1, 1, 1, 200),
)
"""Kinds of models, also with larger units than any prompt here."""


class NaiveBlocks:
    """(row, tier) -> blocks."""

    def __init__(self, rows: int) -> None:
        self.held: dict[tuple[int, int], set[int]] = {
            (row, tier): set() for row in range(rows) for tier in range(len(TIERS))
        }
        self.rows = rows
        self.lost: dict[int, int] = {}
        """By place: the block that nobody had in memory any more when it was removed last."""
        self.evicted, self.restored = [0] * rows, [0] * rows

    def store(self, row: int, tier: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            is_new = not any(block in self.held[one, tier] for one in range(self.rows))
            if is_new and tier < len(MEMORIES) and self.lost.get(block % LOST_MAX) == block:
                del self.lost[block % LOST_MAX]
                self.restored[row] += 1
            self.held[row, tier].add(block)

    def remove(self, row: int, tier: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self.held[row, tier]:
                self.held[row, tier].remove(block)
                self.evicted[row] += tier == 0
                if block and tier < len(MEMORIES) and not any(block in self.of(one) for one in range(self.rows)):
                    self.lost[block % LOST_MAX] = block

    def clear(self, row: int) -> None:
        for tier in range(len(TIERS)):
            self.held[row, tier].clear()
        self.evicted[row] = self.restored[row] = 0

    def of(self, row: int) -> set[int]:
        """What the row has in memory."""
        return set[int]().union(*(self.held[row, tier] for tier in range(len(MEMORIES))))

    def boundary(self, row: int, chain: list[int], at: Boundaries) -> int:
        """The row's longest usable prefix, as its definition says: each possible one is tried."""
        held, ends, stride = self.of(row), self.held[row, BOUNDARY], at.stride
        for end in range(len(chain) // at.step * at.step, 0, -at.step):
            last = chain[end + at.window_beyond - 1 :][:1]
            if at.narrow and last and last[0] ^ NARROW_MARK not in ends:
                continue
            if at.full_beyond or at.window_beyond:
                if self._is_held_beyond(held, ends, chain, end, at):
                    return self._continued(end, at)
                continue
            window = [chain[one - 1] for one in range(end, 0, -at.window)][: at.window_blocks]
            # A block that ends beyond the boundary contains it, and so does a partial one, which has its name.
            beyond = chain[end + stride - end % stride - 1 :][:1] if stride else []
            contained = not stride or end % stride == 0 or chain[end - 1] in held or held.issuperset(beyond or [None])
            full = chain[stride - 1 : end : stride] if stride else []
            if contained and held.issuperset(full) and ends.issuperset(window):
                return self._continued(end, at)
        return 0

    def _continued(self, end: int, at: Boundaries) -> int:
        """Where a request continues that has found this boundary."""
        blocks = len(range(end + at.window_beyond, 0, -at.window))
        return end if blocks >= at.window_blocks else max(0, end - at.short)

    def _is_held_beyond(self, held: set[int], ends: set[int], chain: list[int], end: int, at: Boundaries) -> bool:
        """Whole blocks only, and up to ``beyond``, which the chain must reach."""
        last, full_end = end + at.window_beyond, end + at.full_beyond
        if max(last, full_end if at.stride else 0) > len(chain):
            return False
        window = [chain[one - 1] for one in range(last, 0, -at.window)][: at.window_blocks]
        full = chain[at.stride - 1 : full_end + at.stride - 1 : at.stride] if at.stride else []
        is_whole = not at.stride or len(full) * at.stride >= full_end
        return is_whole and held.issuperset(full) and ends.issuperset(window)

    def depth(self, row: int, chain: list[int]) -> int:
        held = self.of(row)
        return next((depth for depth, block in enumerate(chain) if block not in held), len(chain))

    def cover(self, chain: list[int], first: int, end: int, allowed: list[bool]) -> list[tuple[int, int, int]]:
        sources: list[tuple[int, int, int]] = []
        position = first
        while position < end:
            reach = {row: self.depth(row, chain[position:end]) for row in range(self.rows) if allowed[row]}
            furthest = max(reach.values(), default=0)
            if not furthest:
                break
            row = min(row for row, blocks in reach.items() if blocks == furthest)
            sources.append((row, position, position + furthest))
            position += furthest
        return sources

    def assert_told_by(self, table: BlockTable) -> None:
        """Block by block, and what is summed of them."""
        for (row, tier), blocks in self.held.items():
            assert sorted(unpack_hashes(table.blocks(row, tier))) == sorted(blocks)
        for row in range(self.rows):
            xors = [0] * len(TIERS)
            for tier in range(len(TIERS)):
                for block in self.held[row, tier]:
                    xors[tier] ^= block
            assert table.count(row) == sum(len(self.held[row, tier]) for tier in range(len(TIERS)))
            assert table.xor(row) == digest_xor(xors)
            assert table.evictions(row) == (self.evicted[row], self.restored[row])

    def assert_matched_by(self, table: BlockTable, chain: list[int], kinds: Sequence[Boundaries]) -> None:
        depths = np.full(self.rows, -7, np.int32)
        table.depths(chain, depths)
        assert depths.tolist() == [self.depth(row, chain) for row in range(self.rows)]
        for at in kinds:
            table.boundaries(chain, at, depths)
            assert depths.tolist() == [self.boundary(row, chain, at) for row in range(self.rows)]
        everybody = set[int]().union(*self.held.values())
        assert [table.held(block) for block in chain] == [block in everybody for block in chain]

    def pairs(self) -> int:
        """(block, tier) pairs that anybody holds."""
        by_tier = [set[int]().union(*(self.held[row, tier] for row in range(self.rows))) for tier in range(len(TIERS))]
        return sum(map(len, by_tier))
