"""One request held against the fleet: what each worker would cost for each part, and who is cheapest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from services.router.placement import cost as cost_model
from services.router.placement.candidates import Depths, Shortlist
from services.router.placement.cost import SINGLE, Prompt
from services.router.placement.kv_sources import Holders
from services.router.placement.option import OF_OPTIONS, Option, Weighed
from services.router.placement.placement import PlacementRequest, Policy
from services.router.placement.revisions import ANY
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from shared.contracts.decisions import Part


def fit_rows(need: PlacementRequest, cluster: ClusterView, policy: Policy, now: float) -> t.Bools:
    """Which rows could serve it, full or not: those of the first of its revisions that has any."""
    rows = fit = awake_rows(need, cluster, policy, now) & cluster.table.flags[t.SERVES, : cluster.table.count]
    for revision in need.revisions or (ANY,):
        rows = fit & cluster.mask(need.model, revision)
        if rows.any():
            break
    return rows


def awake_rows(need: PlacementRequest, cluster: ClusterView, policy: Policy, now: float) -> t.Bools:
    """Which rows are there for others: to serve, or, of any model, to give KV to those that may exchange it."""
    table = cluster.table
    awake: t.Bools = table.flags[t.READY, : table.count].copy()
    awake &= table.numbers[t.HEARD_AT, : table.count] >= now - policy.silent_s_max
    for worker_id in need.excluded:
        view = cluster.workers.get(worker_id)
        if view is not None:
            awake[view.row] = False
    return awake


def able_rows(fit: t.Bools, need: PlacementRequest, cluster: ClusterView, policy: Policy, now: float) -> t.Bools:
    """Of which rows KV may be asked: of those that could serve it, and of stores."""
    flags = cluster.table.flags[:, : cluster.table.count]
    stores = ~flags[t.SERVES] & flags[t.EXCHANGES]
    if stores.any():
        fit = fit | (stores & awake_rows(need, cluster, policy, now))  # not in place: who serves stays as it is
    able: t.Bools = fit & flags[t.EXCHANGES]
    return able


class Weighing:
    """All predictions for one request. Of ``count`` free workers, ``options`` are those that can be best."""

    __slots__ = ("able", "count", "depths", "full", "holders", "need", "options", "policy")

    def __init__(
        self, need: PlacementRequest, cluster: ClusterView, depths: Depths, policy: Policy, now: float
    ) -> None:
        self.need, self.policy = need, policy
        table, fit = cluster.table, fit_rows(need, cluster, policy, now)
        room = table.numbers[t.LEGS, : table.count] < table.numbers[t.LEGS_MAX, : table.count]
        free = fit & room
        rows = np.flatnonzero(free)
        self.full = fit & ~room
        """Rows that could serve it and have no room."""
        self.count = len(rows)
        self.options: list[Option] = []
        least = policy.fetch_tokens_min if need.fetch_tokens_min is None else need.fetch_tokens_min
        # What cannot be split may need its prompt computed, such as for the prompt's log probabilities.
        self.able = None if need.whole else able_rows(fit, need, cluster, policy, now)
        self.depths = depths
        blocks = depths.of(need.hashes) if need.hashes and self.count else None
        self.holders = Holders(table, blocks, self.able, least)
        if not self.count:
            return
        prompt = Prompt(
            need.prompt_tokens,
            cost_model.tokens_out_believed(need.tokens_out),
            0 <= policy.stream_tokens_min <= need.prompt_tokens,
            now,
            need.targets.itl_s if need.targets.itl_s < inf else 0.0,
        )
        if self.count > policy.weighed_max:
            shortlist = Shortlist(table, self.holders, prompt)
            chosen = shortlist.rows(free, (need.targets.ttft_s, need.targets.itl_s))
            chosen = list(dict.fromkeys([*chosen, *self._asked_for(cluster, rows)]))
            self._add(chosen, cluster, shortlist.weighed(chosen))
        else:
            chosen = rows.tolist()
            self._add(chosen, cluster, [self._weighed(row, cluster, prompt) for row in chosen])

    def pick(self, part: Part, options: Iterable[Option]) -> Option | None:
        """The cheapest that keeps the targets, or the cheapest if none does; among equals the one with the fewest
        legs, then the one whose turn is longest ago.
        """
        among = list(options)
        if len(among) > 1 and (self.need.targets.ttft_s < inf or self.need.targets.itl_s < inf):
            among = [option for option in among if option.fine(part, self.need.targets)] or among
        if len(among) < 2:
            return among[0] if among else None
        costs_s = [option.cost_s(part) for option in among]
        limit_s = min(costs_s) + self.policy.tie_s
        near = [option for option, cost_s in zip(among, costs_s, strict=True) if cost_s <= limit_s]
        return min(near, key=lambda option: (option.legs, option.turn))

    def pair(self, prefills: Sequence[Option], decodes: Sequence[Option]) -> tuple[Option, Option] | None:
        """The cheapest two different workers that may exchange KV."""
        best, best_s = None, inf
        for group in sorted({option.group for option in prefills}):
            ones = [option for option in prefills if option.group == group]
            others = [option for option in decodes if option.group == group]
            prefill, decode = self.pick(Part.PREFILL, ones), self.pick(Part.DECODE, others)
            pairs = [(prefill, decode)]
            if prefill is decode:
                pairs = [
                    (prefill, self.pick(Part.DECODE, [other for other in others if other is not prefill])),
                    (self.pick(Part.PREFILL, [one for one in ones if one is not decode]), decode),
                ]
            for one, other in pairs:
                if one is not None and other is not None and one.cost.prefill_s + other.cost.decode_s < best_s:
                    best, best_s = (one, other), one.cost.prefill_s + other.cost.decode_s
        return best

    def _asked_for(self, cluster: ClusterView, rows: t.Ints) -> list[int]:
        """Whom the client wants are always weighed, if they are free."""
        forced = self.need.forced
        asked = (forced.prefill_worker, forced.decode_worker) if forced is not None else ()
        views = [cluster.workers.get(worker_id) for worker_id in asked]
        return [view.row for view in views if view is not None and view.row in rows]

    def _weighed(self, row: int, cluster: ClusterView, prompt: Prompt) -> Weighed:
        table, holders, view = cluster.table, self.holders, cluster.views[row]
        assert view is not None
        numbers = table.numbers[:, row].tolist()
        held = reach = holders.held_by(row, int(numbers[t.BLOCK_SIZE]), prompt.tokens)
        if table.flags[t.EXCHANGES, row]:
            reach = holders.reachable_by(view, int(table.groups[row]), held, prompt.tokens)
        return cost_model.weigh(numbers, prompt, held, reach, SINGLE)

    def _add(self, rows: list[int], cluster: ClusterView, weighed: Sequence[Weighed]) -> None:
        numbers = cluster.table.numbers[OF_OPTIONS][:, rows].T.tolist()
        groups = cluster.table.groups[rows].tolist()
        for row, group, of_row, costs in zip(rows, groups, numbers, weighed, strict=True):
            view = cluster.views[row]
            assert view is not None
            self.options.append(Option(view, group, of_row, costs))
