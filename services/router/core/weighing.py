"""One request held against the whole fleet: what each worker would cost for each part, and who is cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.router.core import cost_model as cost
from services.router.core import fleet_table as t
from services.router.core.cluster_view import ClusterView
from services.router.core.considered import Weighed, best_of, taken
from services.router.core.kv_sources import Holders
from services.router.core.placement import Need, Policy
from services.router.core.prefix_index import PrefixIndex
from shared.contracts.decisions import Part

UNDECIDED = -1


class Pair(NamedTuple):
    """Places, among the weighed workers, of a prefill and a decode worker, and what they cost together."""

    prefill: int
    decode: int
    cost_s: float


def fit_rows(need: Need, cluster: ClusterView, policy: Policy, now: float) -> t.Bools:
    """Which rows could serve it, full or not."""
    table = cluster.table
    fit = cluster.mask(need.model) & table.flags[t.READY, : table.count]
    fit &= table.numbers[t.HEARD_AT, : table.count] >= now - policy.silent_s_max
    for worker_id in need.excluded:
        view = cluster.workers.get(worker_id)
        if view is not None:
            fit[view.row] = False
    return fit


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
        if not hashes:
            return np.zeros(table.count, dtype=np.int64)
        if self._as_of != (table.moves, self._index.moves):
            self._as_of = (table.moves, self._index.moves)
            self._slots = np.full(table.count, -1, dtype=np.int64)
            for worker_id, view in self._cluster.workers.items():
                self._slots[view.row] = self._index.slot(worker_id)
        depths = np.append(self._index.match_depths(hashes), 0)
        return depths[self._slots].astype(np.int64)


class Weighing:
    """All predictions for one request; places count the workers that are free."""

    __slots__ = (
        "answering",
        "computing",
        "cost_decode_s",
        "cost_prefill_s",
        "cost_whole_s",
        "holders",
        "need",
        "on",
        "policy",
        "tokens_max",
        "views",
    )

    def __init__(self, need: Need, cluster: ClusterView, depths: Depths, policy: Policy, now: float) -> None:
        self.need, self.policy = need, policy
        table, fit = cluster.table, fit_rows(need, cluster, policy, now)
        rows = np.nonzero(fit & (table.numbers[t.LEGS, : table.count] < table.numbers[t.LEGS_MAX, : table.count]))[0]
        self.on = cost.Rows(rows, table.numbers[:, rows], table.flags[:, rows], table.groups[rows])
        self.views = cluster.views
        if not len(rows):
            return
        sizes = np.maximum(table.numbers[t.BLOCK_SIZE, : table.count], 1.0).astype(np.int64)
        tokens = depths.of(need.hashes) * sizes
        last = max(0, need.prompt_tokens - 1)  # The last token is always computed, however much is cached.
        self.tokens_max = last // sizes * sizes
        held = np.minimum(tokens, self.tokens_max)[rows]
        # What cannot be split may need its prompt computed, such as for the prompt's log probabilities.
        least = policy.fetch_tokens_min if need.fetch_tokens_min is None else need.fetch_tokens_min
        nobody = need.whole or not need.hashes
        self.holders = Holders(table, fit & (not nobody), tokens, least)
        reachable = self.holders.reachable(self.on, held, self.tokens_max[rows])
        prompt = cost.Prompt(need.prompt_tokens, cost.tokens_out_believed(need.tokens_out))
        arrivals_per_s = cluster.arrivals.per_s(now) / max(1, int(np.count_nonzero(self.on.flags[t.PREFILLS])))
        streams = 0 <= policy.stream_tokens_min <= need.prompt_tokens
        self.computing = cost.computing(self.on, prompt, held, reachable, arrivals_per_s)
        self.answering = cost.answering(self.on, prompt, held, streamed=streams)
        answer_s = self.answering.decode_s + self.answering.others_s
        self.cost_prefill_s = self.computing.ttft_s() + self.computing.others_s
        self.cost_decode_s = self.answering.handoff_s + self.answering.queue_s + answer_s
        self.cost_whole_s = self.cost_prefill_s + answer_s

    @property
    def anybody(self) -> bool:
        """Whether somebody is free."""
        return bool(len(self.on.rows))

    def can(self, flag: int) -> t.Bools:
        """Which workers have that flag of the fleet's table."""
        flags: t.Bools = self.on.flags[flag]
        return flags

    def fine(self, part: Part) -> t.Bools:
        """Which workers keep the targets in that part."""
        targets = self.need.targets
        soon = self.computing.ttft_s() <= targets.ttft_s
        if part is Part.PREFILL:
            return soon
        steady = self.answering.itl_s <= targets.itl_s
        return steady if part is Part.DECODE else steady & soon

    def cost_s(self, part: Part) -> t.Floats:
        """What is compared."""
        return {Part.PREFILL: self.cost_prefill_s, Part.DECODE: self.cost_decode_s, Part.WHOLE: self.cost_whole_s}[part]

    def pick(self, part: Part, among: t.Bools) -> int:
        """The cheapest that keeps the targets, or the cheapest if none does; among equals the one with the fewest legs
        of ours, then the one whose turn is longest ago. UNDECIDED when there is nobody.
        """
        places = np.nonzero(among)[0]
        if len(places) > 1 and not self._promised_nothing():
            fine = self.fine(part)[places]
            places = places[fine] if fine.any() else places
        if len(places) < 2:
            return int(places[0]) if len(places) else UNDECIDED
        costs = self.cost_s(part)[places]
        limit = costs.min() * (1.0 + self.policy.tie_ratio) + self.policy.tie_s
        near = places[costs <= limit]
        if len(near) == 1:
            return int(near[0])
        numbers = self.on.numbers
        return int(near[np.lexsort((numbers[t.TURN, near], numbers[t.OWN_LEGS, near]))[0]])

    def pair(self, prefills: t.Bools, decodes: t.Bools) -> Pair | None:
        """The cheapest two different workers that may exchange KV."""
        best: Pair | None = None
        for group in set(self.on.groups[prefills].tolist()) & set(self.on.groups[decodes].tolist()):
            here = self.on.groups == group
            prefill, decode = self.pick(Part.PREFILL, prefills & here), self.pick(Part.DECODE, decodes & here)
            pairs = [(prefill, decode)]
            if prefill == decode:
                others = here.copy()
                others[prefill] = False
                pairs = [
                    (prefill, self.pick(Part.DECODE, decodes & others)),
                    (self.pick(Part.PREFILL, prefills & others), decode),
                ]
            for one, other in pairs:
                if UNDECIDED not in (one, other):
                    found = Pair(one, other, float(self.cost_prefill_s[one] + self.cost_decode_s[other]))
                    best = found if best is None or found.cost_s < best.cost_s else best
        return best

    def weighed(self, part: Part, among: t.Bools, chosen: int) -> Weighed:
        """The best few, for the record."""
        places = np.nonzero(among)[0]
        costs = self.cost_s(part)[places]
        at = int(np.searchsorted(places, chosen)) if chosen >= 0 else UNDECIDED
        best = best_of(costs, at)
        kept = places[best]
        one = taken(kept, self.computing) if part is not Part.DECODE else None
        two = taken(kept, self.answering) if part is not Part.PREFILL else None
        worker_ids = [view.record.worker_id for row in self.on.rows[kept] if (view := self.views[row]) is not None]
        places_of = {int(place): number for number, place in enumerate(kept)}
        return Weighed(part, worker_ids, places_of.get(chosen, UNDECIDED), costs[best], self.fine(part)[kept], one, two)

    def _promised_nothing(self) -> bool:
        return self.need.targets.ttft_s == np.inf and self.need.targets.itl_s == np.inf
