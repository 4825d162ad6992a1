"""Of a large fleet, the few workers that can be best: so that only these are weighed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.router.placement import cost as cost_model
from services.router.placement.cost import ARRAYS, Answering, Computing, Cost, Prompt
from services.router.placement.kv_sources import Holders
from services.router.placement.option import Weighed
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex

SHORTLISTED = 4
"""Of each part. More than one, for those that are equal take turns, and some may have to be left out."""
NEVER_S = 1e9


class Depths:
    """How many blocks of a prompt, from its start, each row of the fleet's table holds."""

    def __init__(self, cluster: ClusterView, index: PrefixIndex) -> None:
        self._cluster = cluster
        self._index = index
        self._slots: t.Ints = np.zeros(0, dtype=np.int64)
        """Where the index has each row's worker; one behind its last slot where it has not."""
        self._as_of = (-1, -1)

    def of(self, hashes: Sequence[int]) -> t.Ints:
        """Zero for whom the index has not met."""
        table = self._cluster.table
        if self._as_of != (table.moves, self._index.moves):
            self._as_of = (table.moves, self._index.moves)
            self._slots = np.full(table.count, -1, dtype=np.int64)
            for worker_id, view in self._cluster.workers.items():
                self._slots[view.row] = self._index.slot(worker_id)
        depths: t.Ints = np.append(self._index.match_depths(hashes), 0)[self._slots].astype(np.int64)
        return depths

    def beyond(self, hashes: Sequence[int], first: int, end: int, able: t.Bools) -> list[tuple[int, int, int]]:
        """The fewest ``able`` rows that together hold the blocks from ``first`` on, up to ``end``, each with its part:
        of a chain whose beginning others hold. Seldom anybody.
        """
        end = min(end, len(hashes))
        if first >= end or not self._index.held(hashes[first]):
            return []
        slots = self._slots[np.flatnonzero(able)]
        mask = np.zeros(len(self._index.slots), dtype=np.bool_)
        mask[slots[slots >= 0]] = True
        rows = {int(self._slots[row]): row for row in np.flatnonzero(able).tolist()}
        return [(rows[slot], begin, stop) for slot, begin, stop in self._index.cover(hashes, first, end, mask)]


class Shortlist:
    """All rows of the table worked out for one prompt, since picking some out first takes longer than that."""

    def __init__(self, table: t.FleetTable, holders: Holders, prompt: Prompt) -> None:
        self._numbers, self._flags = table.numbers[:, : table.count], table.flags[:, : table.count]
        self._groups = table.groups[: table.count]
        held, reachable = holders.of_all(
            self._numbers[t.BLOCK_SIZE], self._groups, self._flags[t.EXCHANGES], prompt.tokens
        )
        self._one, self._two, self._costs = cost_model.weigh(self._numbers, prompt, held, reachable, ARRAYS)

    def rows(self, free: t.Bools, targets_s: tuple[float, float]) -> list[int]:
        """The cheapest of the ``free`` rows for each part, those first that keep the targets (time to the first token,
        and between tokens).
        """
        prefill_s, decode_s, whole_s = self._costs
        if targets_s[0] < np.inf:
            late_s = np.where(self._one.ttft_s() > targets_s[0], NEVER_S, 0.0)
            prefill_s, whole_s = prefill_s + late_s, whole_s + late_s
        if targets_s[1] < np.inf:
            slow_s = np.where(self._two.itl_s > targets_s[1], NEVER_S, 0.0)
            decode_s, whole_s = decode_s + slow_s, whole_s + slow_s
        parts = ((prefill_s, t.PREFILLS), (decode_s, t.DECODES), (whole_s, t.DECODES), (whole_s, None))
        chosen: dict[int, None] = {}
        for here in self._apart(np.flatnonzero(free)):
            able: dict[int | None, t.Ints] = {None: here}
            for cost_s, flag in parts:
                if flag not in able:
                    able[flag] = here[self._flags[flag, here]]
                chosen.update(dict.fromkeys(_cheapest(able[flag], cost_s)))
        return list(chosen)

    def _apart(self, rows: t.Ints) -> list[t.Ints]:
        """By group: mostly there is one."""
        groups = self._groups[rows]
        if len(rows) and (groups == groups[0]).all():
            return [rows]
        return [rows[groups == group] for group in set(groups.tolist())]

    def weighed(self, rows: list[int]) -> list[Weighed]:
        """These rows, each for itself."""
        at = np.array(rows, dtype=np.int64)
        columns = [_at(column, at) for column in (*self._one, *self._two)]
        costs = [_at(column, at) for column in self._costs]
        ones, twos = columns[: len(self._one)], columns[len(self._one) :]
        parts = zip(zip(*ones, strict=True), zip(*twos, strict=True), zip(*costs, strict=True), strict=True)
        return [(Computing._make(one), Answering._make(two), Cost._make(cost)) for one, two, cost in parts]


def _at(column: Any, rows: t.Ints) -> list[Any]:
    """Where nobody can be helped, some columns are one number for all."""
    return list(column[rows].tolist()) if isinstance(column, np.ndarray) else [column] * len(rows)


def _cheapest(rows: t.Ints, cost_s: t.Floats) -> list[int]:
    few = rows[np.argpartition(cost_s[rows], SHORTLISTED)[:SHORTLISTED]] if len(rows) > SHORTLISTED else rows
    cheapest: list[int] = few.tolist()
    return cheapest
