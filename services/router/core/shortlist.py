"""Of a large fleet, the few workers that can be best: so that only these are weighed one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.router.core import cost_model
from services.router.core import fleet_table as t
from services.router.core.cluster_view import ClusterView
from services.router.core.cost_model import ARRAYS, Prompt
from services.router.core.kv_sources import Holders
from services.router.core.prefix_index import PrefixIndex

SHORTLISTED = 6
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


def shortlist(
    rows: t.Ints, table: t.FleetTable, holders: Holders, prompt: Prompt, targets_s: tuple[float, float]
) -> list[int]:
    """The cheapest of ``rows`` for each part, those first that keep the targets (time to the first token, and between
    tokens).
    """
    n, groups = table.numbers[:, rows], table.groups[rows]
    held = holders.held(rows, n[t.BLOCK_SIZE], prompt.tokens)
    on = (rows, groups, n[t.BLOCK_SIZE])
    reachable = holders.reachable(on, held, table.flags[t.EXCHANGES, rows], prompt.tokens)
    one, two, costs = cost_model.weigh(n, prompt, held, reachable, ARRAYS)
    late = np.where(one.ttft_s() > targets_s[0], NEVER_S, 0.0)
    slow = np.where(two.itl_s > targets_s[1], NEVER_S, 0.0)
    prefills, decodes = table.flags[t.PREFILLS, rows], table.flags[t.DECODES, rows]
    chosen: dict[int, None] = {}
    for group in set(groups.tolist()) if (groups != groups[0]).any() else (groups[0],):
        here = groups == group
        for cost_s, able in (
            (costs.prefill_s + late, prefills & here),
            (costs.decode_s + slow, decodes & here),
            (costs.whole_s + late + slow, decodes & here),
            (costs.whole_s + late + slow, here),
        ):
            chosen.update(dict.fromkeys(_cheapest(np.where(able, cost_s, np.inf), rows)))
    return list(chosen)


def _cheapest(cost_s: t.Floats, rows: t.Ints) -> list[int]:
    few = np.argpartition(cost_s, SHORTLISTED)[:SHORTLISTED] if len(cost_s) > SHORTLISTED else np.arange(len(cost_s))
    cheapest: list[int] = rows[few[cost_s[few] < np.inf]].tolist()
    return cheapest
