"""Where a request goes. A placer is a policy on a fleet's view; ``Costs`` is Baton's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from services.router.placement.candidates import Depths
from services.router.placement.considered import Among, Considered
from services.router.placement.kv_sources import SOURCES_MAX, source_of
from services.router.placement.option import Option
from services.router.placement.placement import Placement, PlacementRequest, Policy, Rejection, refuse, refuse_pair
from services.router.placement.request_fields import Mode
from services.router.placement.weighing import Weighing, fit_rows
from services.router.state.cluster_view import ClusterView, exchanges_kv
from services.router.state.prefix_index import PrefixIndex
from shared.contracts.decisions import Part, TtftParts
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

HIT_SHARE_OF_DECODE_FIRST = 0.5
"""Of the prompt, what a decode worker must be believed to have before it is asked to answer alone."""
HIT_SHARE_SLACK = 0.8
"""What is found there may be so much less than was believed: some was evicted meanwhile."""


class Placer(Protocol):
    """Chooses workers for requests. It may remember what it chose; the fleet's view is given to it when it is made."""

    def place(self, need: PlacementRequest, now: float) -> Placement | Rejection:
        """Which workers serve it, with what is known at ``now`` (seconds, monotonic)."""


class Costs:
    """The smallest predicted cost in seconds: the request's own, and what it adds to that of others."""

    def __init__(self, cluster: ClusterView, index: PrefixIndex, policy: Policy) -> None:
        self._cluster = cluster
        self._depths = Depths(cluster, index)
        self._policy = policy

    def place(self, need: PlacementRequest, now: float) -> Placement | Rejection:
        """Choose. Remembers whose turn it was, so that equals take turns. A revision that has workers, but none that
        can serve it, is passed over.
        """
        placed = self._place(need, now)
        if isinstance(placed, Rejection) and placed.reason is Reason.NO_WORKER and len(need.revisions) > 1:
            return self.place(msgspec.structs.replace(need, revisions=need.revisions[1:]), now)
        return placed

    def _place(self, need: PlacementRequest, now: float) -> Placement | Rejection:
        weighing = Weighing(need, self._cluster, self._depths, self._policy, now)
        if not weighing.count:
            fit = fit_rows(need, self._cluster, self._policy, now)
            return refuse(need, self._cluster, busy=bool(fit.any()))
        return Chooser(weighing, self._cluster).made()


class Chooser:
    """One request's choice, from what was weighed."""

    def __init__(self, weighing: Weighing, cluster: ClusterView) -> None:
        self._weighing = weighing
        self._need = weighing.need
        self._cluster = cluster
        forced = weighing.need.forced
        self._prefill_asked = forced.prefill_worker if forced is not None else WorkerId("")
        self._decode_asked = forced.decode_worker if forced is not None else WorkerId("")
        self._alone: Sequence[Option] = ()
        """Who could have done all of it, where that was weighed against a pair."""
        self._prefills: Sequence[Option] = ()
        self._decodes: Sequence[Option] = ()
        self._may_pair = False

    def made(self) -> Placement | Rejection:
        """The cheapest of what is allowed."""
        need, weighing = self._need, self._weighing
        if need.whole or need.mode is Mode.AGGREGATED:
            return self._by_anybody(need.whole or "asked for")
        self._prefills = list(filter(self._computes, weighing.options))
        self._decodes = list(filter(self._goes_on, weighing.options))
        alone = [] if self._prefill_asked else [option for option in self._decodes if self._may_alone(option)]
        pair = weighing.pair(self._prefills, self._decodes)
        self._alone = alone
        self._may_pair = pair is not None
        whole = weighing.pick(Part.WHOLE, alone) if need.mode is not Mode.DISAGGREGATED else None
        if need.mode is Mode.DECODE_FIRST and whole is not None:
            return self._whole(whole, alone, "asked for")
        if pair is not None and not self._keeps_whole(pair, whole):
            pair_s = pair[0].cost.prefill_s + pair[1].cost.decode_s
            if whole is None or pair_s < whole.cost.whole_s:
                return self._apart(*pair)
        if whole is not None:
            return self._whole(whole, alone, "one worker is best for both legs")
        if need.mode is Mode.DISAGGREGATED or self._prefill_asked:
            return refuse_pair(need, busy=self._full())
        return self._by_anybody("one role is missing")

    def _keeps_whole(self, pair: tuple[Option, Option], whole: Option | None) -> bool:
        """Two workers that do both hold a prompt's KV twice, which no time tells of: only for the targets' sake."""
        both = pair[0].view.record.role is Role.BOTH and pair[1].view.record.role is Role.BOTH
        auto = self._need.mode is Mode.AUTO and not self._prefill_asked
        return auto and both and whole is not None and whole.fine(Part.WHOLE, self._need.targets)

    def _computes(self, option: Option) -> bool:
        asked = self._prefill_asked in ("", option.view.record.worker_id)
        return asked and option.view.record.role is not Role.DECODE

    def _answers(self, option: Option) -> bool:
        return self._decode_asked in ("", option.view.record.worker_id)

    def _goes_on(self, option: Option) -> bool:
        return self._answers(option) and option.view.record.role is not Role.PREFILL

    def _may_alone(self, option: Option) -> bool:
        """Who of those that may decode may answer without a prefill worker: those that do both, and decode workers that
        have most of it.
        """
        need, record, one = self._need, option.view.record, option.computing
        if need.mode is not Mode.DECODE_FIRST:
            if record.role is Role.BOTH:
                return True
            if need.cache_hit_threshold is not None:
                return False
        most = one.cached + one.fetched >= HIT_SHARE_OF_DECODE_FIRST * need.prompt_tokens
        return bool(need.may_decode_first and most and exchanges_kv(record) and one.computed <= record.step_tokens_max)

    def _by_anybody(self, why: str) -> Placement | Rejection:
        options = self._weighing.options
        among = list(filter(self._goes_on, options)) or list(filter(self._answers, options))
        option = self._weighing.pick(Part.WHOLE, among)
        return self._whole(option, among, why) if option is not None else refuse_pair(self._need, busy=self._full())

    def _full(self) -> bool:
        """Whether somebody who could have helped has no room just now."""
        rows = self._weighing.full
        asked = [
            self._cluster.workers.get(worker_id) for worker_id in (self._prefill_asked, self._decode_asked) if worker_id
        ]
        return any(view is not None and rows[view.row] for view in asked) if asked else bool(rows.any())

    def _whole(self, option: Option, among: Sequence[Option], why: str) -> Placement:
        need, one, two = self._need, option.computing, option.answering
        split = not need.whole and need.mode is not Mode.AGGREGATED
        guarded = split and (need.mode is Mode.DECODE_FIRST or option.view.record.role is Role.DECODE)
        guarded = guarded and self._goes_on(option) and self._may_alone(option)
        share = HIT_SHARE_SLACK * (one.cached + one.fetched) / max(1, need.prompt_tokens)
        asked = need.cache_hit_threshold if need.mode is Mode.DECODE_FIRST else None
        self._cluster.picked(option.view)
        return msgspec.structs.replace(
            self._computed_by(option),
            mode=Mode.DECODE_FIRST if guarded else Mode.AGGREGATED,
            hit_share_min=(share if asked is None else asked) if guarded else 0.0,
            predicted_s=one.ttft_s() + two.room_s + two.decode_s,
            predicted_itl_s=two.itl_s,
            why="it has most of the prompt" if guarded else why,
            considered=self._considered(
                (Part.WHOLE, among, option), *(self._parts(None, None) if self._may_pair else ())
            ),
        )

    def _apart(self, prefill: Option, decode: Option) -> Placement:
        placed, policy, two = self._computed_by(prefill), self._weighing.policy, decode.answering
        self._cluster.picked(prefill.view, decode.view)
        record = prefill.view.record
        exchange = exchanges_kv(record)
        soon = exchange and record.prefix_caching and placed.predicted.total_s() <= policy.stream_s_max
        streamed = soon and 0 <= policy.stream_tokens_min <= placed.uncached_tokens
        predicted = TtftParts(
            queue_s=placed.predicted.queue_s,
            fetch_s=placed.predicted.fetch_s,
            prefill_s=placed.predicted.prefill_s,
            handoff_s=two.handoff_s,
            decode_queue_s=two.queue_s + two.room_s,
            first_token_s=two.first_s,
            transit_s=prefill.way_s + decode.way_s,
        )
        return msgspec.structs.replace(
            placed,
            mode=Mode.DISAGGREGATED,
            prefill=prefill.view,
            decode=decode.view,
            handoff=(source_of(prefill.view, follow=streamed),) if exchange else (),
            streamed=streamed,
            predicted=predicted,
            predicted_s=predicted.total_s() + two.decode_s,
            predicted_itl_s=two.itl_s,
            why="prefill and decode apart cost least",
            considered=self._considered(*self._parts(prefill, decode), (Part.WHOLE, self._alone, None)),
        )

    def _computed_by(self, option: Option) -> Placement:
        """What that worker does for the prompt; the rest is still to be said."""
        one, need = option.computing, self._need
        sources = self._sources(option)
        further = self._further(option) if one.fetched and need.forced is None else []
        more = sum(source.end - source.first for source in further) * option.view.record.hashing.block_size
        return Placement(
            mode=Mode.AGGREGATED,
            decode=option.view,
            cached_tokens=one.cached,
            fetched_tokens=one.fetched + more,
            uncached_tokens=one.computed - more,
            context_tokens=need.prompt_tokens + need.tokens_out,
            sources=(*sources, *further),
            predicted=TtftParts(
                queue_s=one.queue_s, fetch_s=one.fetch_s, prefill_s=one.prefill_s, transit_s=option.way_s
            ),
        )

    def _sources(self, option: Option) -> list[KvSource]:
        forced, one, view = self._need.forced, option.computing, option.view
        if forced is not None and forced.sources is not None:
            asked = [self._cluster.workers.get(worker_id) for worker_id in forced.sources]
            others = [holder for holder in asked if holder is not None and holder is not view]
            return [source_of(holder) for holder in others if holder.pairs_with == view.pairs_with]
        if not one.fetched:
            return []
        span = (one.cached, one.cached + one.fetched)
        return self._weighing.holders.sources(view, self._cluster.views, option.group, span)

    def _further(self, option: Option) -> list[KvSource]:
        """Who holds what follows, although nobody holds the prompt so far from its start."""
        weighing, view, one = self._weighing, option.view, option.computing
        if weighing.able is None:
            return []
        block_size = view.record.hashing.block_size
        able = weighing.able & (self._cluster.table.groups[: len(weighing.able)] == option.group)
        able[view.row] = False
        first, last = (one.cached + one.fetched) // block_size, max(0, self._need.prompt_tokens - 1) // block_size
        parts = weighing.depths.beyond(self._need.hashes, first, last, able)
        if not weighing.holders.enough(sum(end - begin for _row, begin, end in parts) * block_size):
            return []
        holders = [(self._cluster.views[row], begin, end) for row, begin, end in parts[:SOURCES_MAX]]
        return [source_of(holder, first=begin, end=end) for holder, begin, end in holders if holder is not None]

    def _parts(self, prefill: Option | None, decode: Option | None) -> tuple[Among, Among]:
        """Of a pair."""
        return (Part.PREFILL, self._prefills, prefill), (Part.DECODE, self._decodes, decode)

    def _considered(self, *parts: Among) -> Considered:
        return Considered(self._weighing.count, parts, self._need.targets)
