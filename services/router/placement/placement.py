"""Which workers serve a request: the pair with the smallest predicted cost, or one worker for all of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.router.placement.considered import NOTHING_CONSIDERED, Considered
from services.router.placement.request_fields import Forced, Mode
from services.router.placement.slo import NO_TARGETS, Targets
from services.router.state.cluster_view import ClusterView, WorkerView
from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource

RETRY_AFTER_S = 1.0
"""Told to clients when nobody is fit or everybody is full; a worker's report may change that within a second."""
NOTHING_PREDICTED = TtftParts()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator decided about placement."""

    silent_s_max: float = 3.0
    """A worker that was not heard for so long gets nothing new."""
    tie_s: float = 0.002
    """Costs that differ by less count as equal; equals take turns, so that requests do not herd onto one of them."""
    stream_tokens_min: int = 1024
    """Decode is dispatched with prefill when that has so many tokens to compute; 0: always, negative: never."""
    stream_s_max: float = 20.0
    """Decode is not dispatched with a prefill that, with its time in the queue, is predicted to take longer: it would
    hold room for the prompt all the while.
    """
    weighed_max: int = 12
    """So many workers are all weighed one by one; more are first cut down to those that can be best."""
    fetch_tokens_min: int = 256
    """Fewer tokens than this are computed, not fetched from another worker; a request may say otherwise."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
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
    cache_hit_threshold: float | None = None
    """The client's; None: it does not say."""
    may_decode_first: bool = True
    """Whether a decode worker may be asked to answer alone: not again when one has refused."""
    forced: Forced | None = None
    targets: Targets = NO_TARGETS
    tenant: str = ""
    priority: int = 0
    revisions: tuple[str, ...] = ()
    """Which revisions may serve it, the wanted one first (see ``revisions``); empty: any."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the request goes, and what is expected of it."""

    mode: Mode
    decode: WorkerView
    """Serves the decode leg, or the whole request when there is no other."""
    prefill: WorkerView | None = None
    cached_tokens: int = 0
    """Expected to be found by the worker that computes the prompt."""
    fetched_tokens: int = 0
    """Expected to be had from ``sources``."""
    uncached_tokens: int = 0
    """Expected to be computed: the rest of the prompt."""
    context_tokens: int = 0
    """Prompt and completion, as far as they are known."""
    sources: tuple[KvSource, ...] = ()
    """Whom the worker that computes the prompt should ask first."""
    handoff: tuple[KvSource, ...] = ()
    """Whom the decode worker may ask for the prompt's KV: the prefill worker, if their connector can."""
    streamed: bool = False
    """Both legs are dispatched together: decode takes the KV as prefill computes it."""
    hit_share_min: float = 0.0
    """DECODE_FIRST: a worker that has a smaller share of the prompt shall refuse it, and it goes on disaggregated."""
    predicted: TtftParts = NOTHING_PREDICTED
    predicted_itl_s: float = 0.0
    predicted_s: float = 0.0
    """Until the completion ends."""
    why: str = ""
    considered: Considered = NOTHING_CONSIDERED


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody can serve it just now."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


def refuse(need: PlacementRequest, cluster: ClusterView, *, busy: bool) -> Rejection:
    """Why nobody is free: the three cases have three answers."""
    if need.model and need.model not in cluster.models_known and cluster.is_whole:
        message = f"The model `{need.model}` does not exist; /v1/models lists those that do."
        return Rejection(reason=Reason.MODEL_UNKNOWN, message=message)
    if busy:
        message = "All workers of this model are full. Try again shortly."
        return Rejection(reason=Reason.WORKER_BUSY, message=message, retry_after_s=RETRY_AFTER_S)
    message = "No worker of this model is ready. Try again shortly."
    return Rejection(reason=Reason.NO_WORKER, message=message, retry_after_s=RETRY_AFTER_S)


def refuse_pair(need: PlacementRequest, *, busy: bool) -> Rejection:
    """There is no pair of workers for it, or none that has room."""
    reason = Reason.WORKER_BUSY if busy else Reason.NO_WORKER
    message = "No prefill and decode workers of the same fingerprint are ready for this model."
    if need.forced is not None:
        message = "The workers that were asked for cannot serve this request together, or are not ready."
    if busy:
        message = "The workers that could serve this request are full. Try again shortly."
    return Rejection(reason=reason, message=message, retry_after_s=RETRY_AFTER_S)
