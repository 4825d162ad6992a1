"""Candidates for a request: one worker each, with the predicted cost of each part that it could serve.

In a large fleet, ``Shortlist`` estimates all workers at once and picks the few that can be best; only these become
candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from services.router.placement import cost as cost_model
from services.router.placement.cost import ARRAYS, Cost, DecodeEstimate, Estimate, PrefillEstimate, Prompt
from services.router.placement.kv_sources import Holders
from services.router.placement.slo import Targets
from services.router.state import fleet_table as t
from services.router.state.block_table import Depths
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import CandidateRecord, Part

SHORTLISTED: Final = 4
"""Workers for each part. More than one, because workers of equal cost alternate, and some may be excluded later."""
NEVER_S: Final = 1e9
"""Added to the cost of a row that misses a target; more than any cost."""
TABLE_COLUMNS: Final = [t.LEGS, t.LAST_CHOSEN, t.TRANSIT_S]
"""Columns of the fleet table that a candidate keeps."""


class PrefixDepths:
    """Counts how many blocks of a prompt, from its start, the worker of each row of the fleet table holds."""

    def __init__(self, cluster: ClusterView, index: PrefixIndex) -> None:
        self._cluster = cluster
        self._index = index
        self._slots: t.Ints = np.zeros(0, dtype=np.int64)
        self._as_of = (-1, -1)

    def of(self, hashes: Sequence[int]) -> t.Ints:
        """Depth of each row; zero for workers that the index does not know."""
        depths: t.Ints = np.append(self._index.match_depths(hashes), 0)[self.slots()].astype(np.int64)
        return depths

    def by_slot(self, hashes: Sequence[int]) -> Depths:
        """Depth of each slot of the index; ``slots`` has each row's."""
        return self._index.match_depths(hashes)

    def slots(self) -> t.Ints:
        """The index's slot of each row's worker; -1 for a worker that the index does not know."""
        table = self._cluster.table
        if self._as_of != (table.moves, self._index.moves):
            self._as_of = (table.moves, self._index.moves)
            self._slots = np.full(table.count, -1, dtype=np.int64)
            for worker_id, view in self._cluster.workers.items():
                self._slots[view.row] = self._index.slot(worker_id)
        return self._slots

    def is_held(self, hashes: Sequence[int], first: int, end: int) -> bool:
        """Whether any worker holds the first of these blocks."""
        return first < min(end, len(hashes)) and self._index.held(hashes[first])

    def beyond(self, hashes: Sequence[int], first: int, end: int, able: t.Bools) -> list[tuple[int, int, int]]:
        """The fewest ``able`` rows that together hold the blocks from ``first`` up to, not including, ``end``, each as
        (row, first block, end). They need not hold the blocks before ``first``. Mostly empty.
        """
        if not self.is_held(hashes, first, end):
            return []
        slots = self._slots[np.flatnonzero(able)]
        mask = np.zeros(len(self._index.slots), dtype=np.bool_)
        mask[slots[slots >= 0]] = True
        rows = {int(self._slots[row]): row for row in np.flatnonzero(able).tolist()}
        return [
            (rows[slot], begin, stop)
            for slot, begin, stop in self._index.cover(hashes, first, min(end, len(hashes)), mask)
        ]


class Shortlist:
    """Computes the cost of all rows of the table for one prompt. Selecting rows first would take longer."""

    def __init__(self, table: t.FleetTable, groups: t.Ints, holders: Holders, prompt: Prompt) -> None:
        """``groups``: of each row (see ``ClusterView.groups``)."""
        self._numbers, self._flags = table.numbers[:, : table.count], table.flags[:, : table.count]
        self._groups = groups[: table.count]
        held, reachable = holders.of_all(
            self._numbers[t.BLOCK_SIZE], self._groups, self._flags[t.EXCHANGES_KV], prompt.tokens
        )
        self._prefill, self._decode, self._costs = cost_model.estimate(self._numbers, prompt, held, reachable, ARRAYS)

    def rows(self, free: t.Bools, targets_s: tuple[float, float]) -> list[int]:
        """The cheapest of the ``free`` rows for each part. Rows that meet the targets (time to the first token, and
        between tokens) come before those that do not.
        """
        prefill_s, decode_s, whole_s = self._costs
        if targets_s[0] < np.inf:
            late_s = np.where(self._prefill.ttft_s() > targets_s[0], NEVER_S, 0.0)
            prefill_s, whole_s = prefill_s + late_s, whole_s + late_s
        if targets_s[1] < np.inf:
            slow_s = np.where(self._decode.step_s > targets_s[1], NEVER_S, 0.0)
            decode_s, whole_s = decode_s + slow_s, whole_s + slow_s
        return cheapest_rows(np.flatnonzero(free), (prefill_s, decode_s, whole_s), self._flags, self._groups)

    def estimates(self, rows: list[int]) -> list[Estimate]:
        """The estimate of each of these rows, in Python numbers."""
        at = np.array(rows, dtype=np.int64)
        columns = [_at(column, at) for column in (*self._prefill, *self._decode)]
        costs = [_at(column, at) for column in self._costs]
        prefills, decodes = columns[: len(self._prefill)], columns[len(self._prefill) :]
        each = zip(zip(*prefills, strict=True), zip(*decodes, strict=True), zip(*costs, strict=True), strict=True)
        return [
            (PrefillEstimate._make(prefill), DecodeEstimate._make(decode), Cost._make(cost))
            for prefill, decode, cost in each
        ]


def cheapest_rows(
    rows: t.Ints, costs: tuple[t.Floats, t.Floats, t.Floats], flags: t.Bools, groups: t.Ints
) -> list[int]:
    """Of each group, the cheapest of ``rows`` for each part; ``costs``: of prefill, decode and both, on each row."""
    prefill_s, decode_s, whole_s = costs
    parts = ((prefill_s, t.PREFILLS), (decode_s, t.DECODES), (whole_s, t.DECODES), (whole_s, None))
    chosen: dict[int, None] = {}
    for of_group in _by_group(rows, groups):
        able: dict[int | None, t.Ints] = {None: of_group}
        for cost_s, flag in parts:
            if flag not in able:
                able[flag] = of_group[flags[flag, of_group]]
            chosen.update(dict.fromkeys(_cheapest(able[flag], cost_s)))
    return list(chosen)


def _by_group(rows: t.Ints, groups: t.Ints) -> list[t.Ints]:
    of_rows = groups[rows]
    if len(rows) and (of_rows == of_rows[0]).all():  # Mostly all workers are of one group.
        return [rows]
    return [rows[of_rows == group] for group in sorted(set(of_rows.tolist()))]


def _at(column: Any, rows: t.Ints) -> list[Any]:
    """A column is a single number where no worker can fetch KV from another."""
    return list(column[rows].tolist()) if isinstance(column, np.ndarray) else [column] * len(rows)


def _cheapest(rows: t.Ints, cost_s: t.Floats) -> list[int]:
    """In order; among equals the first rows."""
    cheapest: list[int] = rows[np.argsort(cost_s[rows], kind="stable")[:SHORTLISTED]].tolist()
    return cheapest


class Candidate:
    """One worker with its estimate. The fleet table changes with every report and every leg, so a candidate keeps the
    numbers at the time of placement. It never changes: the decision log renders it later.
    """

    __slots__ = ("cost", "decode", "group", "last_chosen", "legs", "prefill", "transit_s", "view")

    def __init__(self, view: WorkerView, group: int, numbers: Sequence[float], estimate: Estimate) -> None:
        """``numbers`` are those of ``TABLE_COLUMNS``."""
        self.view = view
        self.group = group
        """Workers of the same group may exchange KV."""
        self.legs, self.last_chosen, self.transit_s = numbers
        self.prefill, self.decode, self.cost = estimate

    def cost_s(self, part: Part) -> float:
        return float(self.cost[0 if part is Part.PREFILL else 1 if part is Part.DECODE else 2])

    def meets(self, targets: Targets, part: Part) -> bool:
        late = part is not Part.DECODE and self.prefill.ttft_s() > targets.ttft_s
        slow = part is not Part.PREFILL and self.decode.step_s > targets.itl_s
        return not late and not slow

    def record(self, part: Part, targets: Targets, *, chosen: bool) -> CandidateRecord:
        """The wire message about this candidate."""
        computes, generates = part is not Part.DECODE, part is not Part.PREFILL
        prefill, decode = self.prefill, self.decode
        return CandidateRecord(
            worker_id=self.view.record.worker_id,
            part=part,
            chosen=chosen,
            cached_tokens=prefill.cached,
            fetched_tokens=prefill.fetched if computes else 0,
            computed_tokens=prefill.computed if computes else 0,
            queue_s=(prefill.queue_s if computes else decode.queue_s) + (decode.kv_wait_s if generates else 0.0),
            fetch_s=prefill.fetch_s if computes else 0.0,
            prefill_s=prefill.prefill_s if computes else 0.0,
            handoff_s=0.0 if computes else decode.handoff_s,
            first_token_s=0.0 if computes else decode.first_s,
            transit_s=self.transit_s,
            decode_s=decode.decode_s if generates else 0.0,
            within_s=decode.within_s if generates else 0.0,
            others_s=(prefill.others_s if computes else 0.0) + (decode.others_s if generates else 0.0),
            cost_s=self.cost_s(part),
            meets_targets=self.meets(targets, part),
        )


PartCandidates = tuple[Part, Sequence[Candidate], Candidate | None]
"""The candidates for a part of the request, and the chosen prefill."""
