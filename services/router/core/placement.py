"""Which workers serve a request: the pair with the smallest predicted time, or one worker for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.router.core import cost_model as cost
from services.router.core.cluster_view import ClusterView, WorkerView
from services.router.core.kv_sources import NOBODY, Holders, exchanges_kv, source_of
from services.router.core.prefix_index import PrefixIndex
from services.router.core.request import Mode
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

RETRY_AFTER_S = 1.0
"""Told to clients when nobody is fit or everybody is full; a worker's report may change that within a second."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator decided about placement."""

    silent_s_max: float = 3.0
    """A worker that was not heard for so long gets nothing new."""
    tie_ratio: float = 0.05
    tie_s: float = 0.002
    """Costs that differ by less count as equal; equals take turns, so that requests do not herd onto one of them."""
    stream_tokens_min: int = 1024
    """Decode is dispatched with prefill when that has so many tokens to compute; 0: always, negative: never."""
    stream_s_max: float = 20.0
    """Decode is not dispatched with a prefill that, with its time in the queue, is predicted to take longer: it would
    hold room for the prompt all the while.
    """
    fetch_tokens_min: int = 256
    """Fewer tokens than this are computed, not fetched from another worker; a request may say otherwise."""


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs of its workers."""

    model: str
    mode: Mode = Mode.AUTO
    whole: str = ""
    """Why it cannot be split; empty when it can."""
    prompt_tokens: int = 0
    hashes: Sequence[int] = ()
    """Block hashes of the prompt; empty when they could not be computed."""
    tokens_out: int = 0
    excluded: frozenset[WorkerId] = frozenset()
    """Workers that have already failed this request."""
    fetch_tokens_min: int | None = None
    """The client's; None: the operator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the request goes, and what is expected of it."""

    mode: Mode
    decode: WorkerView
    """Serves the decode leg, or the whole request when aggregated."""
    prefill: WorkerView | None = None
    cached_tokens: int = 0
    """Expected to be found by the worker that computes the prompt."""
    fetched_tokens: int = 0
    """Expected to be had from ``sources``."""
    uncached_tokens: int = 0
    """Expected to be computed: the rest of the prompt."""
    sources: tuple[KvSource, ...] = ()
    """Whom the worker that computes the prompt should ask first."""
    handoff: tuple[KvSource, ...] = ()
    """Whom the decode worker may ask for the prompt's KV: the prefill worker, if their connector can."""
    streamed: bool = False
    """Both legs are dispatched together: decode takes the KV as prefill computes it."""
    predicted_s: float = 0.0
    """Until the completion ends."""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nobody can serve it just now."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class Offer:
    """One candidate and what it would cost there."""

    view: WorkerView
    cached: int
    fetched: int
    """Tokens that it should have from others."""
    prefill_s: float
    """Queue, fetch and computation of what is not cached."""
    decode_s: float
    """Transfer and completion."""
    whole_s: float


def place(need: Need, cluster: ClusterView, index: PrefixIndex, policy: Policy, now: float) -> Placed | Refused:
    """Choose. Remembers whose turn it was, so that equals take turns."""
    fit = [
        view
        for view in cluster.offering(need.model)
        if view.fit(now, policy.silent_s_max) and view.record.worker_id not in need.excluded
    ]
    free = [view for view in fit if view.legs < view.record.legs_max]
    if not free:
        return refuse(need, cluster, busy=bool(fit))
    matches = index.match(need.hashes) if need.hashes else {}
    tokens_min = policy.fetch_tokens_min if need.fetch_tokens_min is None else need.fetch_tokens_min
    # What cannot be split may need its prompt computed, such as for the prompt's log probabilities.
    holders = Holders(fit, matches, tokens_min) if matches and not need.whole else NOBODY
    offers = [make_offer(view, need, matches.get(view.record.worker_id, 0), holders) for view in free]
    why = need.whole or ("asked for" if need.mode is Mode.AGGREGATED else "")
    if not why:
        pair = best_pair(offers, policy, apart=need.mode is Mode.DISAGGREGATED)
        if pair is not None and pair[0] is not pair[1]:
            return place_apart(pair, need, cluster, policy, holders)
        if need.mode is Mode.DISAGGREGATED:
            message = "No prefill and decode workers of the same fingerprint are ready for this model."
            return Refused(reason=Reason.NO_WORKER, message=message, retry_after_s=RETRY_AFTER_S)
        why = "one role is missing" if pair is None else "one worker is best for both legs"
        if pair is not None:
            return place_whole(pair[0], need, cluster, holders, why)
    answering = [offer for offer in offers if offer.view.record.role is not Role.PREFILL] or offers
    best = pick(answering, [offer.whole_s for offer in answering], policy)
    return place_whole(best, need, cluster, holders, why)


def refuse(need: Need, cluster: ClusterView, *, busy: bool) -> Refused:
    """Why nobody is free: the three cases have three answers."""
    if need.model and need.model not in cluster.models_known:
        return Refused(reason=Reason.MODEL_UNKNOWN, message=f"The model `{need.model}` does not exist.")
    if busy:
        message = "All workers of this model are full. Try again shortly."
        return Refused(reason=Reason.WORKER_BUSY, message=message, retry_after_s=RETRY_AFTER_S)
    message = "No worker of this model is ready. Try again shortly."
    return Refused(reason=Reason.NO_WORKER, message=message, retry_after_s=RETRY_AFTER_S)


def make_offer(view: WorkerView, need: Need, blocks_held: int, holders: Holders) -> Offer:
    """The predicted cost of this request there."""
    block_size = view.record.hashing.block_size
    blocks_max = blocks_cacheable(view, need)
    blocks = min(blocks_held, blocks_max)
    cached = blocks * block_size
    uncached = need.prompt_tokens - cached
    decode_s = cost.decode_s(view, need.prompt_tokens, need.tokens_out)
    transfer_s = cost.transfer_s(view, uncached)
    prefill_s, fetched = cost.prefill_s(view, uncached), 0
    if holders is not NOBODY and (beyond := holders.blocks_beyond(view, blocks, blocks_max)):
        fetching_s = cost.fetch_s(view, beyond * block_size) + cost.prefill_s(view, uncached - beyond * block_size)
        if fetching_s < prefill_s:
            prefill_s, fetched = fetching_s, beyond * block_size
    prefill_s += cost.queue_s(view)
    return Offer(view, cached, fetched, prefill_s, transfer_s + decode_s, prefill_s + decode_s)


def blocks_cacheable(view: WorkerView, need: Need) -> int:
    """Blocks of the prompt that need not be computed. The last token always is, however much is cached."""
    return max(0, need.prompt_tokens - 1) // view.record.hashing.block_size


def sources_of(offer: Offer, need: Need, holders: Holders) -> tuple[KvSource, ...]:
    """Whom that worker should ask before it computes the prompt."""
    if not offer.fetched:
        return ()
    first = offer.cached // offer.view.record.hashing.block_size
    return holders.sources(offer.view, first, blocks_cacheable(offer.view, need))


def best_pair(offers: list[Offer], policy: Policy, *, apart: bool) -> tuple[Offer, Offer] | None:
    """The cheapest prefill and decode worker that may exchange KV. With ``apart`` they must be two."""
    best: tuple[Offer, Offer] | None = None
    best_s = float("inf")
    for fingerprint in {offer.view.pairs_with for offer in offers}:
        group = [offer for offer in offers if offer.view.pairs_with == fingerprint]
        prefills = [offer for offer in group if offer.view.record.role is not Role.DECODE]
        decodes = [offer for offer in group if offer.view.record.role is not Role.PREFILL]
        if not prefills or not decodes:
            continue
        prefill, decode = pick_prefill(prefills, policy), pick_decode(decodes, policy)
        pairs = [(prefill, decode)]
        if apart and prefill is decode:
            pairs = [(prefill, pick_decode(others, policy)) for others in (without(decodes, prefill),) if others]
            pairs += [(pick_prefill(others, policy), decode) for others in (without(prefills, decode),) if others]
        for pair in pairs:
            total_s = pair[0].prefill_s + pair[1].decode_s
            if total_s < best_s:
                best, best_s = pair, total_s
    return best


def pick_prefill(offers: list[Offer], policy: Policy) -> Offer:
    """Where the prompt is computed soonest."""
    return pick(offers, [offer.prefill_s for offer in offers], policy)


def pick_decode(offers: list[Offer], policy: Policy) -> Offer:
    """Where the completion ends soonest."""
    return pick(offers, [offer.decode_s for offer in offers], policy)


def without(offers: list[Offer], taken: Offer) -> list[Offer]:
    """All but one."""
    return [offer for offer in offers if offer is not taken]


def pick(offers: list[Offer], costs: list[float], policy: Policy) -> Offer:
    """The cheapest; among equals the one with the fewest legs of ours, then the one whose turn is longest ago."""
    if len(offers) == 1:
        return offers[0]
    limit = min(costs) * (1.0 + policy.tie_ratio) + policy.tie_s
    near = [offer for offer, cost_s in zip(offers, costs, strict=True) if cost_s <= limit]
    return min(near, key=lambda offer: (offer.view.own_legs, offer.view.picked_at_turn))


def place_apart(
    pair: tuple[Offer, Offer], need: Need, cluster: ClusterView, policy: Policy, holders: Holders
) -> Placed:
    """Two workers, one leg each."""
    prefill, decode = pair
    cluster.picked(prefill.view, decode.view)
    uncached = need.prompt_tokens - prefill.cached - prefill.fetched
    exchange = exchanges_kv(prefill.view.record)
    streamed = exchange and 0 <= policy.stream_tokens_min <= uncached and prefill.prefill_s <= policy.stream_s_max
    return Placed(
        mode=Mode.DISAGGREGATED,
        prefill=prefill.view,
        decode=decode.view,
        cached_tokens=prefill.cached,
        fetched_tokens=prefill.fetched,
        uncached_tokens=uncached,
        sources=sources_of(prefill, need, holders),
        handoff=(source_of(prefill.view, follow=streamed),) if exchange else (),
        streamed=streamed,
        predicted_s=prefill.prefill_s + decode.decode_s,
    )


def place_whole(offer: Offer, need: Need, cluster: ClusterView, holders: Holders, why: str) -> Placed:
    """One worker for all of it."""
    cluster.picked(offer.view)
    return Placed(
        mode=Mode.AGGREGATED,
        decode=offer.view,
        cached_tokens=offer.cached,
        fetched_tokens=offer.fetched,
        uncached_tokens=need.prompt_tokens - offer.cached - offer.fetched,
        sources=sources_of(offer, need, holders),
        predicted_s=offer.whole_s,
        why=why,
    )
