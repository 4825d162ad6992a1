"""Puts a placement together from the candidates that were selected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from services.router.placement.kv_sources import SOURCES_MAX, source_of
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.shortlist import Candidate, PartCandidates, PrefixDepths
from services.router.request.facts import Mode
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import can_exchange_kv
from shared.contracts.decisions import TtftParts
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

AGGREGATED: Final = Mode.AGGREGATED
DECODE_FIRST: Final = Mode.DECODE_FIRST
DISAGGREGATED: Final = Mode.DISAGGREGATED
DECODE: Final = Role.DECODE

ASKED_FOR: Final = "asked for"
BEST_FOR_BOTH: Final = "one worker is best for both legs"
ROLE_MISSING: Final = "one role is missing"
APART: Final = "prefill and decode apart cost least"
HAS_MOST: Final = "it has most of the prompt"
BY_LOAD: Final = "placed by load: its server is outside of Baton, and what that has cached is not known"
HIT_SHARE_SLACK: Final = 0.8
"""A decode worker that was asked to serve alone refuses the leg below this fraction of the expected share: some blocks
may have been evicted meanwhile.
"""


class Selected:
    """The workers for a request."""

    __slots__ = ("alone", "candidates", "considered", "decode", "further", "prefill", "sources", "why")

    def __init__(  # noqa: PLR0913, PLR0917  # as many as a placement is made of
        self,
        decode: Candidate,
        prefill: Candidate | None,
        alone: bool,
        why: str,
        considered: int,
        candidates: Iterable[PartCandidates],
        sources: list[KvSource],
        further: list[KvSource],
    ) -> None:
        self.decode = decode
        """Serves the decode leg, or the whole request when there is no prefill worker."""
        self.prefill = prefill
        self.alone = alone
        """Whether ``decode``, without a prefill worker, is one that may serve the request alone."""
        self.why = why
        self.considered = considered
        self.candidates = candidates
        self.sources = sources
        """For the worker that computes the prompt."""
        self.further = further
        """Sources of the blocks after those of ``sources``, although not of the ones before."""


def further_sources(
    request: PlacementRequest,
    chosen: Candidate,
    cluster: ClusterView,
    depths: PrefixDepths,
    able: Callable[[], t.Bools | None],
    tokens_min: int,
) -> list[KvSource]:
    """For a worker that fetches. ``able``: the rows that may be asked, if any may."""
    prefill, block_size = chosen.prefill, chosen.view.record.hashing.block_size
    first = (prefill.cached + prefill.fetched) // block_size
    last = min(max(0, request.prompt_tokens - 1) // block_size, len(request.hashes))
    if not prefill.fetched or request.forced is not None or not depths.is_held(request.hashes, first, last):
        return []
    rows = able()
    if rows is None:
        return []
    rows = rows & (cluster.groups(request.model)[: len(rows)] == chosen.group)
    rows[chosen.view.row] = False
    spans = depths.beyond(request.hashes, first, last, rows)
    if sum(end - begin for _row, begin, end in spans) * block_size < max(1, tokens_min):
        return []
    holders = [(cluster.views[row], begin, end) for row, begin, end in spans[:SOURCES_MAX]]
    return [source_of(holder, first=begin, end=end) for holder, begin, end in holders if holder is not None]


def assemble(request: PlacementRequest, selected: Selected, cluster: ClusterView, policy: PlacementPolicy) -> Placement:
    """Notes which workers were chosen, so that equal workers take turns."""
    if selected.prefill is None:
        cluster.picked(selected.decode.view)
        return _on_one(request, selected)
    cluster.picked(selected.prefill.view, selected.decode.view)
    return _on_two(request, selected, selected.prefill, policy)


def _more_tokens(selected: Selected, computing: Candidate) -> int:
    """Tokens of the further sources."""
    if not selected.further:
        return 0
    return sum(source.end - source.first for source in selected.further) * computing.view.record.hashing.block_size


def _on_one(request: PlacementRequest, selected: Selected) -> Placement:
    chosen = selected.decode
    prefill, decode, record = chosen.prefill, chosen.decode, chosen.view.record
    split = not request.unsplittable and request.mode is not AGGREGATED
    asked = request.mode is DECODE_FIRST
    guarded = split and (asked or record.role is DECODE) and selected.alone
    share = HIT_SHARE_SLACK * (prefill.cached + prefill.fetched) / max(1, request.prompt_tokens)
    threshold = request.cache_hit_threshold if asked else None
    more = _more_tokens(selected, chosen)
    why = BY_LOAD if record.attached else selected.why
    return Placement(
        mode=DECODE_FIRST if guarded else AGGREGATED,
        decode=chosen.view,
        cached_tokens=prefill.cached,
        fetched_tokens=prefill.fetched + more,
        uncached_tokens=prefill.computed - more,
        context_tokens=request.prompt_tokens + request.sequences * request.tokens_out,
        sources=(*selected.sources, *selected.further),
        hit_share_min=(share if threshold is None else threshold) if guarded else 0.0,
        predicted=TtftParts(
            queue_s=prefill.queue_s, fetch_s=prefill.fetch_s, prefill_s=prefill.prefill_s, transit_s=chosen.transit_s
        ),
        predicted_itl_s=decode.itl_s,
        why=HAS_MOST if guarded else why,
        considered=selected.considered,
        candidates=selected.candidates,
    )


def _on_two(request: PlacementRequest, selected: Selected, computing: Candidate, policy: PlacementPolicy) -> Placement:
    prefill, estimate, record = computing.prefill, selected.decode.decode, computing.view.record
    more = _more_tokens(selected, computing)
    uncached = prefill.computed - more
    can_exchange = can_exchange_kv(record)
    computed_s = prefill.queue_s + prefill.fetch_s + prefill.prefill_s + computing.transit_s
    soon = can_exchange and record.prefix_caching and computed_s <= policy.stream_s_max
    streamed = soon and 0 <= policy.stream_tokens_min <= uncached
    # The answer begins with the prefill leg's token, which waits neither for the KV nor for the step that computes on.
    waits = not can_exchange
    predicted = TtftParts(
        queue_s=prefill.queue_s,
        fetch_s=prefill.fetch_s,
        prefill_s=prefill.prefill_s,
        handoff_s=estimate.handoff_s if waits else 0.0,
        decode_queue_s=estimate.kv_wait_s + (0.0 if streamed else estimate.queue_s),
        first_token_s=estimate.first_s if waits else 0.0,
        transit_s=computing.transit_s + selected.decode.transit_s,
    )
    return Placement(
        mode=DISAGGREGATED,
        prefill=computing.view,
        decode=selected.decode.view,
        cached_tokens=prefill.cached,
        fetched_tokens=prefill.fetched + more,
        uncached_tokens=uncached,
        context_tokens=request.prompt_tokens + request.sequences * request.tokens_out,
        sources=(*selected.sources, *selected.further),
        handoff=(source_of(computing.view, follow=streamed),) if can_exchange else (),
        streamed=streamed,
        predicted=predicted,
        predicted_itl_s=estimate.itl_s,
        why=selected.why,
        considered=selected.considered,
        candidates=selected.candidates,
    )
