"""Which workers serve a request: the pair with the smallest predicted time, or one worker for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.router.core import cost_model as cost
from services.router.core.cluster_view import ClusterView, WorkerView
from services.router.core.prefix_index import PrefixIndex
from services.router.core.request import Mode
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the request goes, and what is expected of it."""

    mode: Mode
    decode: WorkerView
    """Serves the decode leg, or the whole request when aggregated."""
    prefill: WorkerView | None = None
    cached_tokens: int = 0
    """Expected to be found by the worker that computes the prompt."""
    uncached_tokens: int = 0
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
    prefill_s: float
    """Queue and computation of what is not cached."""
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
    offers = [make_offer(view, need, matches.get(view.record.worker_id, 0)) for view in free]
    why = need.whole or ("asked for" if need.mode is Mode.AGGREGATED else "")
    if not why:
        pair = best_pair(offers, policy, apart=need.mode is Mode.DISAGGREGATED)
        if pair is not None and pair[0] is not pair[1]:
            return place_apart(pair, need, cluster)
        if need.mode is Mode.DISAGGREGATED:
            message = "No prefill and decode workers of the same fingerprint are ready for this model."
            return Refused(reason=Reason.NO_WORKER, message=message, retry_after_s=RETRY_AFTER_S)
        why = "one role is missing" if pair is None else "one worker is best for both legs"
        if pair is not None:
            return place_whole(pair[0], need, cluster, why)
    answering = [offer for offer in offers if offer.view.record.role is not Role.PREFILL] or offers
    best = pick(answering, [offer.whole_s for offer in answering], policy)
    return place_whole(best, need, cluster, why)


def refuse(need: Need, cluster: ClusterView, *, busy: bool) -> Refused:
    """Why nobody is free: the three cases have three answers."""
    if need.model and need.model not in cluster.models_known:
        return Refused(reason=Reason.MODEL_UNKNOWN, message=f"The model `{need.model}` does not exist.")
    if busy:
        message = "All workers of this model are full. Try again shortly."
        return Refused(reason=Reason.WORKER_BUSY, message=message, retry_after_s=RETRY_AFTER_S)
    message = "No worker of this model is ready. Try again shortly."
    return Refused(reason=Reason.NO_WORKER, message=message, retry_after_s=RETRY_AFTER_S)


def make_offer(view: WorkerView, need: Need, blocks_held: int) -> Offer:
    """The predicted cost of this request there. The last prompt token is always computed, however much is cached."""
    block_size = view.record.hashing.block_size
    cached = min(blocks_held, max(0, need.prompt_tokens - 1) // block_size) * block_size
    uncached = need.prompt_tokens - cached
    prefill_s = cost.queue_s(view) + cost.prefill_s(view, uncached)
    decode_s = cost.decode_s(view, need.prompt_tokens, need.tokens_out)
    transfer_s = cost.transfer_s(view, uncached)
    return Offer(view, cached, prefill_s, transfer_s + decode_s, prefill_s + decode_s)


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


def place_apart(pair: tuple[Offer, Offer], need: Need, cluster: ClusterView) -> Placed:
    """Two workers, one leg each."""
    prefill, decode = pair
    cluster.picked(prefill.view, decode.view)
    return Placed(
        mode=Mode.DISAGGREGATED,
        prefill=prefill.view,
        decode=decode.view,
        cached_tokens=prefill.cached,
        uncached_tokens=need.prompt_tokens - prefill.cached,
        predicted_s=prefill.prefill_s + decode.decode_s,
    )


def place_whole(offer: Offer, need: Need, cluster: ClusterView, why: str) -> Placed:
    """One worker for all of it."""
    cluster.picked(offer.view)
    return Placed(
        mode=Mode.AGGREGATED,
        decode=offer.view,
        cached_tokens=offer.cached,
        uncached_tokens=need.prompt_tokens - offer.cached,
        predicted_s=offer.whole_s,
        why=why,
    )
