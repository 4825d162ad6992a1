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


def shortlist(
    free: t.Bools, table: t.FleetTable, holders: Holders, prompt: Prompt, targets_s: tuple[float, float]
) -> list[int]:
    """The cheapest of the ``free`` rows for each part, those first that keep the targets (time to the first token, and
    between tokens). All rows are worked out, since picking some out first takes longer than that.
    """
    n, flags, groups = table.numbers[:, : table.count], table.flags[:, : table.count], table.groups[: table.count]
    held, reachable = holders.of_all(n[t.BLOCK_SIZE], groups, flags[t.EXCHANGES], prompt.tokens)
    one, two, costs = cost_model.weigh(n, prompt, held, reachable, ARRAYS)
    prefill_s, decode_s, whole_s = costs
    if targets_s[0] < np.inf:
        late_s = np.where(one.ttft_s() > targets_s[0], NEVER_S, 0.0)
        prefill_s, whole_s = prefill_s + late_s, whole_s + late_s
    if targets_s[1] < np.inf:
        slow_s = np.where(two.itl_s > targets_s[1], NEVER_S, 0.0)
        decode_s, whole_s = decode_s + slow_s, whole_s + slow_s
    prefills, decodes = flags[t.PREFILLS] & free, flags[t.DECODES] & free
    chosen: dict[int, None] = {}
    for group in set(groups[free].tolist()):
        here = groups == group
        for cost_s, able in ((prefill_s, prefills), (decode_s, decodes), (whole_s, decodes), (whole_s, free)):
            chosen.update(dict.fromkeys(_cheapest(np.where(able & here, cost_s, np.inf))))
    return list(chosen)


def _cheapest(cost_s: t.Floats) -> list[int]:
    few = np.argpartition(cost_s, SHORTLISTED)[:SHORTLISTED] if len(cost_s) > SHORTLISTED else np.arange(len(cost_s))
    cheapest: list[int] = few[cost_s[few] < np.inf].tolist()
    return cheapest
