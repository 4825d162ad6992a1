"""The block table as plainly as it can be said, and the tables that are compared with it."""

from __future__ import annotations

import numpy as np
import pytest

from services.router.state.block_table import IS_COMPILED, TIERS, BlockTable, PythonBlockTable, block_table
from shared.contracts.kv_events import digest_xor, unpack_hashes

TABLES = [
    pytest.param(PythonBlockTable, id="python"),
    pytest.param(block_table, id="native", marks=pytest.mark.skipif(not IS_COMPILED, reason="not built here")),
]


class NaiveBlocks:
    """(row, tier) -> blocks."""

    def __init__(self, rows: int) -> None:
        self.held: dict[tuple[int, int], set[int]] = {
            (row, tier): set() for row in range(rows) for tier in range(len(TIERS))
        }
        self.rows = rows

    def of(self, row: int) -> set[int]:
        return set[int]().union(*(self.held[row, tier] for tier in range(len(TIERS))))

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

    def assert_matched_by(self, table: BlockTable, chain: list[int]) -> None:
        depths = np.full(self.rows, -7, np.int32)
        table.depths(chain, depths)
        assert depths.tolist() == [self.depth(row, chain) for row in range(self.rows)]
        everybody = set[int]().union(*self.held.values())
        assert [table.held(block) for block in chain] == [block in everybody for block in chain]

    def pairs(self) -> int:
        """(block, tier) pairs that anybody holds."""
        by_tier = [set[int]().union(*(self.held[row, tier] for row in range(self.rows))) for tier in range(len(TIERS))]
        return sum(map(len, by_tier))
