"""Where a request goes. A placer is a policy on a fleet's view; ``Costs`` is Baton's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from services.router.core import fleet_table as t
from services.router.core.cluster_view import ClusterView, WorkerView
from services.router.core.considered import Considered
from services.router.core.kv_sources import source_of
from services.router.core.placement import Need, Placed, Policy, Refused, refuse, refuse_pair
from services.router.core.prefix_index import PrefixIndex
from services.router.core.request import Mode
from services.router.core.weighing import UNDECIDED, Depths, Pair, Weighing, fit_rows
from shared.contracts.decisions import Part, TtftParts
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource

HIT_SHARE_OF_DECODE_FIRST = 0.5
"""Of the prompt, what a decode worker must be believed to have before it is asked to answer alone."""
HIT_SHARE_SLACK = 0.8
"""What is found there may be so much less than was believed: some was evicted meanwhile."""


class Placer(Protocol):
    """Chooses workers for requests. It may remember what it chose; the fleet's view is given to it when it is made."""

    def place(self, need: Need, now: float) -> Placed | Refused:
        """Which workers serve it, with what is known at ``now`` (seconds, monotonic)."""


class Costs:
    """The smallest predicted cost in seconds: the request's own, and what it adds to that of others."""

    def __init__(self, cluster: ClusterView, index: PrefixIndex, policy: Policy) -> None:
        self._cluster = cluster
        self._depths = Depths(cluster, index)
        self._policy = policy

    def place(self, need: Need, now: float) -> Placed | Refused:
        """Choose. Remembers whose turn it was, so that equals take turns."""
        weighing = Weighing(need, self._cluster, self._depths, self._policy, now)
        if not weighing.anybody:
            fit = fit_rows(need, self._cluster, self._policy, now)
            return refuse(need, self._cluster, busy=bool(fit.any()))
        return Choice(weighing, self._cluster).made()


class Choice:
    """One request's choice, from what was weighed."""

    def __init__(self, weighing: Weighing, cluster: ClusterView) -> None:
        self._weighing = weighing
        self._need = weighing.need
        self._cluster = cluster
        forced = weighing.need.forced
        self._prefills = weighing.can(t.PREFILLS) & self._only(forced.prefill_worker if forced else WorkerId(""))
        self._answerers = self._only(forced.decode_worker if forced else WorkerId(""))
        self._decodes = weighing.can(t.DECODES) & self._answerers
        self._split = bool(forced and forced.prefill_worker)

    def made(self) -> Placed | Refused:
        """The cheapest of what is allowed."""
        need, weighing = self._need, self._weighing
        if need.whole or need.mode is Mode.AGGREGATED:
            among = self._decodes if self._decodes.any() else self._answerers
            return self._whole_or_none(among, need.whole or "asked for")
        among = self._alone() & (not self._split)
        pair = weighing.pair(self._prefills, self._decodes)
        whole = weighing.pick(Part.WHOLE, among) if need.mode is not Mode.DISAGGREGATED else UNDECIDED
        if need.mode is Mode.DECODE_FIRST and whole != UNDECIDED:
            return self._whole(whole, among, "asked for")
        if pair is not None and (whole == UNDECIDED or pair.cost_s < weighing.cost_whole_s[whole]):
            return self._apart(pair)
        if whole != UNDECIDED:
            return self._whole(whole, among, "one worker is best for both legs")
        if need.mode is Mode.DISAGGREGATED or self._split:
            return refuse_pair(need)
        return self._whole_or_none(self._decodes if self._decodes.any() else self._answerers, "one role is missing")

    def _only(self, worker_id: WorkerId) -> t.Bools:
        """Everybody, or the one that was asked for."""
        if not worker_id:
            return np.ones(len(self._weighing.on.rows), dtype=np.bool_)
        view = self._cluster.workers.get(worker_id)
        only: t.Bools = self._weighing.on.rows == (view.row if view is not None else UNDECIDED)
        return only

    def _alone(self) -> t.Bools:
        """Who may answer without a prefill worker: those that do both, and decode workers that have most of it."""
        weighing, need = self._weighing, self._need
        both: t.Bools = self._decodes & weighing.can(t.PREFILLS)
        if not need.may_decode_first or (need.cache_hit_threshold is not None and need.mode is not Mode.DECODE_FIRST):
            return both
        had = weighing.computing.cached + weighing.computing.fetched
        few = weighing.computing.computed <= weighing.on.numbers[t.STEP_TOKENS]
        most = had >= HIT_SHARE_OF_DECODE_FIRST * need.prompt_tokens
        first: t.Bools = self._decodes & weighing.can(t.EXCHANGES) & few & most
        return first if need.mode is Mode.DECODE_FIRST else both | first

    def _whole_or_none(self, among: t.Bools, why: str) -> Placed | Refused:
        place = self._weighing.pick(Part.WHOLE, among)
        return self._whole(place, among, why) if place != UNDECIDED else refuse_pair(self._need)

    def _whole(self, place: int, among: t.Bools, why: str) -> Placed:
        weighing, need, one = self._weighing, self._need, self._weighing.computing
        view = self._view(place)
        guarded = not need.whole and need.mode is not Mode.AGGREGATED and not weighing.can(t.PREFILLS)[place]
        guarded = guarded or need.mode is Mode.DECODE_FIRST
        share = HIT_SHARE_SLACK * float(one.cached[place] + one.fetched[place]) / max(1, need.prompt_tokens)
        asked = need.cache_hit_threshold if need.mode is Mode.DECODE_FIRST else None
        self._cluster.picked(view)
        return replace(
            self._computed_by(place),
            mode=Mode.DECODE_FIRST if guarded else Mode.AGGREGATED,
            hit_share_min=(share if asked is None else asked) if guarded else 0.0,
            predicted_s=float(one.ttft_s()[place] + weighing.answering.decode_s[place]),
            predicted_itl_s=float(weighing.answering.itl_s[place]),
            why="it has most of the prompt" if guarded else why,
            considered=Considered(len(weighing.on.rows), [weighing.weighed(Part.WHOLE, among, place)]),
        )

    def _apart(self, pair: Pair) -> Placed:
        weighing, two = self._weighing, self._weighing.answering
        prefill, decode = self._view(pair.prefill), self._view(pair.decode)
        self._cluster.picked(prefill, decode)
        placed, policy = self._computed_by(pair.prefill), weighing.policy
        exchange = bool(weighing.can(t.EXCHANGES)[pair.prefill])
        soon = placed.predicted.total_s() <= policy.stream_s_max and bool(weighing.can(t.FOLLOWED)[pair.prefill])
        streamed = soon and 0 <= policy.stream_tokens_min <= placed.uncached_tokens
        handoff_s, queue_s = float(two.handoff_s[pair.decode]), float(two.queue_s[pair.decode])
        predicted = TtftParts(
            queue_s=placed.predicted.queue_s,
            fetch_s=placed.predicted.fetch_s,
            prefill_s=placed.predicted.prefill_s,
            handoff_s=handoff_s,
            decode_queue_s=queue_s,
            first_token_s=float(two.itl_s[pair.decode]),
        )
        considered = Considered(
            len(weighing.on.rows),
            [
                weighing.weighed(Part.PREFILL, self._prefills, pair.prefill),
                weighing.weighed(Part.DECODE, self._decodes, pair.decode),
            ],
        )
        return replace(
            placed,
            mode=Mode.DISAGGREGATED,
            prefill=prefill,
            decode=decode,
            handoff=(source_of(prefill, follow=streamed),) if exchange else (),
            streamed=streamed,
            predicted=predicted,
            predicted_s=predicted.total_s() + float(two.decode_s[pair.decode]),
            predicted_itl_s=float(two.itl_s[pair.decode]),
            why="prefill and decode apart cost least",
            considered=considered,
        )

    def _computed_by(self, place: int) -> Placed:
        """What that worker does for the prompt; the rest is still to be said."""
        one, need = self._weighing.computing, self._need
        predicted = TtftParts(
            queue_s=float(one.queue_s[place]),
            fetch_s=float(one.fetch_s[place]),
            prefill_s=float(one.prefill_s[place]),
        )
        return Placed(
            mode=Mode.AGGREGATED,
            decode=self._view(place),
            cached_tokens=int(one.cached[place]),
            fetched_tokens=int(one.fetched[place]),
            uncached_tokens=int(one.computed[place]),
            context_tokens=need.prompt_tokens + need.tokens_out,
            sources=self._sources(place),
            predicted=predicted,
        )

    def _sources(self, place: int) -> tuple[KvSource, ...]:
        weighing, forced = self._weighing, self._need.forced
        view = self._view(place)
        if forced is not None and forced.sources is not None:
            asked = [self._cluster.workers.get(worker_id) for worker_id in forced.sources]
            return tuple(source_of(one) for one in asked if one is not None and one.pairs_with == view.pairs_with)
        one = weighing.computing
        if not one.fetched[place]:
            return ()
        tokens_max = int(weighing.tokens_max[view.row])
        return tuple(weighing.holders.sources(view, weighing.views, int(one.cached[place]), tokens_max))

    def _view(self, place: int) -> WorkerView:
        view = self._cluster.views[int(self._weighing.on.rows[place])]
        assert view is not None
        return view
