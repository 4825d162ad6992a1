"""The candidates for one request, with their predicted costs, and the cheapest among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from services.router.placement import cost as cost_model
from services.router.placement.cost import SINGLE, Estimate, Prompt
from services.router.placement.kv_sources import Holders
from services.router.placement.placement import PlacementPolicy, PlacementRequest
from services.router.placement.shortlist import TABLE_COLUMNS, Candidate, PrefixDepths, Shortlist
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.revision_names import ANY
from shared.contracts.decisions import Part


def fit_rows(request: PlacementRequest, cluster: ClusterView, policy: PlacementPolicy, now: float) -> t.Bools:
    """Rows that could serve the request, full or not, of the first of its revisions that has any such row."""
    rows = fit = awake_rows(request, cluster, policy, now) & cluster.table.flags[t.SERVES, : cluster.table.count]
    for revision in request.revisions or (ANY,):
        rows = fit & cluster.mask(request.model, revision)
        if rows.any():
            break
    return rows


def awake_rows(request: PlacementRequest, cluster: ClusterView, policy: PlacementPolicy, now: float) -> t.Bools:
    """Rows of any model that are ready, not silent and not excluded by the request."""
    table = cluster.table
    awake: t.Bools = table.flags[t.READY, : table.count].copy()
    awake &= table.numbers[t.HEARD_AT, : table.count] >= now - policy.silent_s_max
    for worker_id in request.excluded:
        view = cluster.workers.get(worker_id)
        if view is not None:
            awake[view.row] = False
    return awake


def source_rows(
    fit: t.Bools, request: PlacementRequest, cluster: ClusterView, policy: PlacementPolicy, now: float
) -> t.Bools:
    """Rows that may be asked for KV: those that could serve the request, and stores."""
    flags = cluster.table.flags[:, : cluster.table.count]
    stores = ~flags[t.SERVES] & flags[t.EXCHANGES_KV]
    if stores.any():
        fit = fit | (stores & awake_rows(request, cluster, policy, now))  # a new array: the caller keeps using ``fit``
    sources: t.Bools = fit & flags[t.EXCHANGES_KV]
    return sources


class Evaluation:
    """All predictions for one request. Of ``count`` free workers, ``candidates`` are those that can be best."""

    __slots__ = ("candidates", "count", "depths", "full", "groups", "holders", "policy", "request", "sources")

    def __init__(
        self, request: PlacementRequest, cluster: ClusterView, depths: PrefixDepths, policy: PlacementPolicy, now: float
    ) -> None:
        self.request, self.policy = request, policy
        table, fit = cluster.table, fit_rows(request, cluster, policy, now)
        has_slot = table.numbers[t.LEGS, : table.count] < table.numbers[t.LEGS_MAX, : table.count]
        free = fit & has_slot
        rows = np.flatnonzero(free)
        self.full = fit & ~has_slot
        """Rows that could serve the request but run as many legs as they may."""
        self.count = len(rows)
        self.candidates: list[Candidate] = []
        tokens_min = policy.fetch_tokens_min if request.fetch_tokens_min is None else request.fetch_tokens_min
        # A request that cannot be split may need its prompt computed, for example for the prompt's log probabilities.
        self.sources = None if request.unsplittable else source_rows(fit, request, cluster, policy, now)
        self.groups = cluster.groups(request.model)
        """See ``ClusterView.groups``."""
        self.depths = depths
        blocks = depths.of(request.hashes) if request.hashes and self.count else None
        self.holders = Holders(table, self.groups, blocks, self.sources, tokens_min)
        if not self.count:
            return
        tokens_out, itl_free_s = cost_model.tokens_out_expected(request.tokens_out), request.targets.itl_s
        if not itl_free_s < inf:
            decoding = rows[table.flags[t.DECODES, rows]]
            speeds = table.numbers[t.DECODE_STEP_S : t.DECODE_CONTEXT_TOKEN_S + 1, decoding]
            itl_free_s = cost_model.uncrowded_itl_s(speeds, request.prompt_tokens, tokens_out)
        prompt = Prompt(
            request.prompt_tokens,
            tokens_out,
            0 <= policy.stream_tokens_min <= request.prompt_tokens,
            now,
            cost_model.eviction_price(table.numbers[:, rows[table.flags[t.PREFILLS, rows]]]),
            itl_free_s,
        )
        if self.count > policy.weighed_max:
            shortlist = Shortlist(table, self.groups, self.holders, prompt)
            chosen = shortlist.rows(free, (request.targets.ttft_s, request.targets.itl_s))
            chosen = list(dict.fromkeys([*chosen, *self._named_by_client(cluster, rows)]))
            self._add(chosen, cluster, shortlist.estimates(chosen))
        else:
            chosen = rows.tolist()
            self._add(chosen, cluster, [self._estimate(row, cluster, prompt) for row in chosen])

    def cheapest(self, part: Part, candidates: Iterable[Candidate]) -> Candidate | None:
        """The cheapest that meets the targets, or the cheapest if none does; among equals the one with the fewest
        legs, then the one that was chosen longest ago.
        """
        among = list(candidates)
        if len(among) > 1 and (self.request.targets.ttft_s < inf or self.request.targets.itl_s < inf):
            among = [candidate for candidate in among if candidate.meets(self.request.targets, part)] or among
        if len(among) < 2:
            return among[0] if among else None
        costs_s = [candidate.cost_s(part) for candidate in among]
        limit_s = min(costs_s) + self.policy.tie_s
        near = [candidate for candidate, cost_s in zip(among, costs_s, strict=True) if cost_s <= limit_s] or among
        return min(near, key=lambda candidate: (candidate.legs, candidate.last_chosen))

    def cheapest_pair(
        self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]
    ) -> tuple[Candidate, Candidate] | None:
        """The cheapest two different workers that may exchange KV."""
        best, best_s = None, inf
        for group in sorted({candidate.group for candidate in prefills}):
            ones = [candidate for candidate in prefills if candidate.group == group]
            others = [candidate for candidate in decodes if candidate.group == group]
            prefill, decode = self.cheapest(Part.PREFILL, ones), self.cheapest(Part.DECODE, others)
            pairs = [(prefill, decode)]
            if prefill is decode:
                pairs = [
                    (prefill, self.cheapest(Part.DECODE, [other for other in others if other is not prefill])),
                    (self.cheapest(Part.PREFILL, [one for one in ones if one is not decode]), decode),
                ]
            for one, other in pairs:
                if one is not None and other is not None and one.cost.prefill_s + other.cost.decode_s < best_s:
                    best, best_s = (one, other), one.cost.prefill_s + other.cost.decode_s
        return best

    def _named_by_client(self, cluster: ClusterView, rows: t.Ints) -> list[int]:
        """A worker that the client names is always a candidate, if it is free."""
        forced = self.request.forced
        named = (forced.prefill_worker, forced.decode_worker) if forced is not None else ()
        views = [cluster.workers.get(worker_id) for worker_id in named]
        return [view.row for view in views if view is not None and view.row in rows]

    def _estimate(self, row: int, cluster: ClusterView, prompt: Prompt) -> Estimate:
        table, holders, view = cluster.table, self.holders, cluster.views[row]
        assert view is not None
        numbers = table.numbers[:, row].tolist()
        held = reachable = holders.held_by(row, int(numbers[t.BLOCK_SIZE]), prompt.tokens)
        if table.flags[t.EXCHANGES_KV, row]:
            reachable = holders.reachable_by(view, int(self.groups[row]), held, prompt.tokens)
        return cost_model.estimate(numbers, prompt, held, reachable, SINGLE)

    def _add(self, rows: list[int], cluster: ClusterView, estimates: Sequence[Estimate]) -> None:
        numbers = cluster.table.numbers[TABLE_COLUMNS][:, rows].T.tolist()
        groups = self.groups[rows].tolist()
        for row, group, of_row, estimate in zip(rows, groups, numbers, estimates, strict=True):
            view = cluster.views[row]
            assert view is not None
            self.candidates.append(Candidate(view, group, of_row, estimate))
