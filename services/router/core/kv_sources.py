"""Who holds more of a prompt than the worker that is to compute it: whom that worker should ask before it computes."""

from __future__ import annotations

import numpy as np

from services.router.core import fleet_table as t
from services.router.core.cluster_view import WorkerView
from services.router.core.cost_model import Rows
from shared.contracts.kv_exchange import KvSource

SOURCES_MAX = 2
"""The second is asked for what the first no longer has."""


class Holders:
    """Who holds how many tokens of one prompt, from its start, the most first. Too few tokens count as none."""

    __slots__ = ("_ranked", "_tokens_min")

    def __init__(self, table: t.FleetTable, fit: t.Bools, held: t.Ints, tokens_min: int) -> None:
        """``fit`` and ``held`` (tokens) have an entry for each row of the table."""
        self._tokens_min = max(1, tokens_min)
        rows = np.nonzero(fit & table.flags[t.EXCHANGES, : table.count] & (held >= self._tokens_min))[0]
        ranked = rows[np.argsort(-held[rows], kind="stable")]
        self._ranked = [(int(held[row]), int(row), int(table.groups[row])) for row in ranked]

    def reachable(self, on: Rows, held: t.Ints, tokens_max: t.Ints) -> t.Ints:
        """Tokens that each of these workers, which hold ``held``, may have with what one other holds; ``held`` itself
        where nobody helps.
        """
        if not self._ranked:
            return held
        most = np.zeros_like(held)
        for group in dict.fromkeys(group for _, _, group in self._ranked):
            first, *others = [(tokens, row) for tokens, row, one in self._ranked if one == group][:2]
            here = on.groups == group
            most[here] = first[0]
            most[here & (on.rows == first[1])] = others[0][0] if others else 0
        reach = np.minimum(most, tokens_max)
        helps = (reach - held >= self._tokens_min) & on.flags[t.EXCHANGES]
        return np.where(helps, reach, held) if helps.any() else held

    def sources(self, view: WorkerView, views: list[WorkerView | None], tokens: int, tokens_max: int) -> list[KvSource]:
        """Whom ``view``, which holds ``tokens``, should ask for what lies behind."""
        block_size = view.record.hashing.block_size
        sources: list[KvSource] = []
        for held, row, _group in self._ranked:
            end = min(held, tokens_max)
            if len(sources) == SOURCES_MAX or end - tokens < self._tokens_min:
                break
            holder = views[row]
            if holder is not None and holder is not view and holder.pairs_with == view.pairs_with:
                sources.append(source_of(holder, first=tokens // block_size, end=end // block_size))
        return sources


def source_of(view: WorkerView, *, first: int = 0, end: int = 0, follow: bool = False) -> KvSource:
    """A worker's present life as a source; without ``end`` (a block), as far as the prompt goes."""
    record = view.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=first, end=end, follow=follow)
