"""Puts a placement together from the candidates that were selected."""

from __future__ import annotations

from typing import Final

from services.router.placement.candidates import WHY, Candidate, Candidates
from services.router.placement.kv_sources import source_of
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.specification import (
    ALONE_ROLE,
    APART,
    ASKED_FOR,
    LEG_TRANSIT_SHARE,
    NOTHING_TO_HAND_OVER,
    RECEIVER_ROLE,
)
from services.router.request.facts import Mode
from services.router.state.worker_view import can_exchange_kv
from shared.contracts.decisions import TtftParts
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

AGGREGATED: Final = Mode.AGGREGATED
DECODE_FIRST: Final = Mode.DECODE_FIRST
DISAGGREGATED: Final = Mode.DISAGGREGATED
DECODE: Final = Role.DECODE

HAS_MOST: Final = "it has most of the prompt"
BY_LOAD: Final = "placed by load: its server is outside of Baton, and what that has cached is not known"


def on_one(
    request: PlacementRequest,
    candidates: Candidates,
    chosen: Candidate,
    sources: list[KvSource],
    further: list[KvSource],
    policy: PlacementPolicy,
    prompt_step_s: float,
) -> Placement:
    """One worker serves the request. ``further``: sources of the blocks after those of ``sources``."""
    of, record = chosen.estimate, chosen.view.record
    split = not request.unsplittable and request.mode is not AGGREGATED
    asked = request.mode is DECODE_FIRST
    own, share = request.cache_hit_threshold, (of.cached + of.fetched) / max(1, request.prompt_tokens)
    guarded = (
        split and share > 0.0 and bool(of.roles & ALONE_ROLE) and (asked or (record.role is DECODE and own is None))
    )
    hit_share_min: float | None = None
    if guarded:
        hit_share_min = policy.decode_first_found_min * share if own is None else own
    elif (candidates.why == NOTHING_TO_HAND_OVER and own is None) or (asked and not of.roles & RECEIVER_ROLE):
        hit_share_min = 0.0
    more = _more_tokens(further, chosen)
    why = (request.unsplittable if candidates.why == ASKED_FOR else "") or WHY[candidates.why]
    if guarded:
        why = HAS_MOST
    elif record.attached:
        why = BY_LOAD
    return Placement(
        mode=DECODE_FIRST if guarded else AGGREGATED,
        decode=chosen.view,
        cached_tokens=of.cached,
        fetched_tokens=of.fetched + more,
        uncached_tokens=of.computed - more,
        context_tokens=request.prompt_tokens + request.sequences * request.tokens_out,
        sources=(*sources, *further),
        hit_share_min=hit_share_min,
        predicted=TtftParts(
            queue_s=of.queue_s, fetch_s=of.fetch_s, prefill_s=of.prefill_s, front_end_and_bus_s=of.transit_s
        ),
        predicted_itl_s=of.itl_s,
        step_s=of.step_s,
        prompt_step_s=prompt_step_s,
        answer_step_s=of.step_s,
        why=why,
        considered=candidates.considered,
        candidates=candidates,
    )


def on_two(  # noqa: PLR0913, PLR0917  # as many as a pair is made of
    request: PlacementRequest,
    candidates: Candidates,
    computing: Candidate,
    decoding: Candidate,
    sources: list[KvSource],
    further: list[KvSource],
    policy: PlacementPolicy,
    prompt_step_s: float,
) -> Placement:
    """One worker computes the prompt, and another one the answer."""
    of, answering, record = computing.estimate, decoding.estimate, computing.view.record
    more = _more_tokens(further, computing)
    uncached = of.computed - more
    can_exchange = can_exchange_kv(record)
    computed_s = of.queue_s + of.fetch_s + of.prefill_s + of.transit_s
    soon = can_exchange and record.prefix_caching and computed_s <= policy.stream_s_max
    streamed = soon and 0 <= policy.stream_tokens_min <= uncached
    # The answer begins with the prefill leg's token, which waits neither for the KV nor for the step that computes on.
    waits = not can_exchange
    predicted = TtftParts(
        queue_s=of.queue_s,
        fetch_s=of.fetch_s,
        prefill_s=of.prefill_s,
        handoff_s=answering.handoff_s if waits else 0.0,
        decode_queue_s=answering.kv_wait_s + (0.0 if streamed else answering.queue_s),
        decode_prefill_s=answering.first_s if waits else 0.0,
        front_end_and_bus_s=(of.transit_s + answering.transit_s) * (LEG_TRANSIT_SHARE if streamed else 1.0),
    )
    return Placement(
        mode=DISAGGREGATED,
        prefill=computing.view,
        decode=decoding.view,
        cached_tokens=of.cached,
        fetched_tokens=of.fetched + more,
        uncached_tokens=uncached,
        context_tokens=request.prompt_tokens + request.sequences * request.tokens_out,
        sources=(*sources, *further),
        handoff=(source_of(computing.view, follow=streamed),) if can_exchange else (),
        streamed=streamed,
        predicted=predicted,
        predicted_itl_s=answering.itl_s,
        step_s=of.step_s,
        prompt_step_s=prompt_step_s,
        answer_step_s=answering.step_s,
        why=WHY[APART],
        considered=candidates.considered,
        candidates=candidates,
    )


def _more_tokens(further: list[KvSource], computing: Candidate) -> int:
    """Tokens of the further sources."""
    if not further:
        return 0
    return sum([source.end - source.first for source in further]) * computing.view.record.hashing.block_size
