"""Which workers hold how much of a prompt, and which of them a worker should ask for the KV that it lacks."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from services.router.state import fleet_table as t
from services.router.state.worker_view import WorkerView
from shared.contracts.kv_exchange import KvSource

SOURCES_MAX: Final = 2
"""The second is asked for what the first has evicted meanwhile."""
RANKED_MAX: Final = 8
"""Holders of each group that may be asked; those with the longest match are enough."""


class Holder(NamedTuple):
    """A worker that can be asked for KV."""

    blocks: int
    row: int


class Holders:
    """The holders of one prompt's KV."""

    __slots__ = ("_blocks", "_ranked", "tokens_min")

    def __init__(
        self, table: t.FleetTable, groups: t.Ints, blocks: t.Ints | None, sources: t.Bools | None, tokens_min: int
    ) -> None:
        """``groups``: of each row (see ``ClusterView.groups``). ``blocks``: how many of the prompt's blocks, from its
        start, each row of the table holds; None when the prompt's hashes are not known. ``sources``: rows that may be
        asked; None: none may.
        """
        self.tokens_min = max(1, tokens_min)
        self._blocks = blocks
        self._ranked: dict[int, list[Holder]] = {}
        if blocks is None or sources is None:
            return
        rows = np.flatnonzero(sources & (blocks * table.numbers[t.BLOCK_SIZE, : table.count] >= self.tokens_min))
        if len(rows):
            self._rank(rows[np.argsort(-blocks[rows], kind="stable")], groups)

    def held_by(self, row: int, block_size: int, prompt_tokens: int) -> int:
        """Tokens that a worker need not compute. The engine always computes the last one, however much is cached."""
        if self._blocks is None:
            return 0
        return min(int(self._blocks[row]), max(0, prompt_tokens - 1) // block_size) * block_size

    def reachable_by(self, view: WorkerView, group: int, held: int, prompt_tokens: int) -> int:
        """Tokens that a worker that holds ``held`` has after it fetched from one other; ``held`` if that is too few to
        be worth it.
        """
        block_size = view.record.hashing.block_size
        ranked = self._ranked.get(group)
        most = ranked[0].blocks if ranked else 0  # Where that is the worker itself, it has nothing to fetch.
        reach = min(most, max(0, prompt_tokens - 1) // block_size) * block_size
        return reach if reach - held >= self.tokens_min else held

    def of_all(
        self, block_sizes: t.Floats, groups: t.Ints, exchange: t.Bools, prompt_tokens: int
    ) -> tuple[t.Ints, t.Ints]:
        """``held_by`` and ``reachable_by`` of every row of the table; the same array twice when no row can be helped.
        ``exchange``: rows that can fetch KV.
        """
        if self._blocks is None:
            nothing = np.zeros(len(groups), dtype=np.int64)
            return nothing, nothing
        sizes = block_sizes.astype(np.int64)
        most = max(0, prompt_tokens - 1) // sizes
        held: t.Ints = np.minimum(self._blocks, most) * sizes
        if not self._ranked:
            return held, held
        reach = np.zeros(len(groups), dtype=np.int64)
        for group, ranked in self._ranked.items():
            reach[groups == group] = ranked[0].blocks
        reach = np.minimum(reach, most) * sizes
        return held, np.where(exchange & (reach - held >= self.tokens_min), reach, held)

    def sources(
        self, view: WorkerView, views: list[WorkerView | None], group: int, span: tuple[int, int]
    ) -> list[KvSource]:
        """The workers that ``view`` should ask for the prompt's tokens from ``span[0]`` to at most ``span[1]``."""
        block_size = view.record.hashing.block_size
        first, last = span[0] // block_size, span[1] // block_size
        sources: list[KvSource] = []
        for one in self._ranked.get(group, ()):
            end = min(one.blocks, last)
            if len(sources) == SOURCES_MAX or (end - first) * block_size < self.tokens_min:
                break
            holder = views[one.row]
            if holder is not None and holder is not view:
                sources.append(source_of(holder, first=first, end=end))
        return sources

    def _rank(self, rows: t.Ints, groups: t.Ints) -> None:
        assert self._blocks is not None
        for group in set(groups[rows].tolist()):
            best = rows[groups[rows] == group][:RANKED_MAX]
            self._ranked[group] = list(map(Holder, self._blocks[best].tolist(), best.tolist()))


def source_of(view: WorkerView, *, first: int = 0, end: int = 0, follow: bool = False) -> KvSource:
    """A worker in its present epoch as a source of the blocks ``first`` to ``end`` - 1; 0: to the prompt's end."""
    record = view.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=first, end=end, follow=follow)
