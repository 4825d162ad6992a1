"""What is asked of placement, and its result: a placement on one or two workers, or a rejection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from services.router.placement.candidates import PartCandidates
from services.router.placement.slo import NO_TARGETS, Targets
from services.router.request.facts import ForcedWorkers, Mode
from services.router.settings import Settings
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource

RETRY_AFTER_S = 1.0
"""Time after which clients may ask again when no worker is ready or all are full; a worker's report may change that
within a second."""
NOTHING_PREDICTED = TtftParts()


class PlacementPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings, and constants that tests change."""

    silent_s_max: float = 3.0
    """A worker that was silent for longer gets no new legs."""
    tie_s: float = 0.002
    """Costs that differ by less count as equal. Equal workers take turns, so that requests do not all go to one."""
    stream_tokens_min: int = 0
    """The decode leg is dispatched together with the prefill leg when that has at least this many tokens to compute; 0:
    always, negative: never.
    """
    stream_s_max: float = 20.0
    """The longest predicted prefill (queue included) beside which the decode leg is dispatched; in a longer one it
    would reserve KV blocks for the prompt all that time.
    """
    weighed_max: int = 12
    """The most free workers that all become candidates; of more, only a shortlist does."""
    fetch_tokens_min: int = 256
    """Fewer tokens than this are computed, not fetched from another worker; a request may override it."""
    decode_first_share_min: float = 0.5
    """A decode worker may be asked to serve a request alone if it is expected to have this share of the prompt."""
    decode_first_found_min: float = 0.8
    """A decode worker that is asked to serve alone refuses below this fraction of the expected share, as some blocks
    may have been evicted meanwhile.
    """

    @classmethod
    def from_settings(cls, settings: Settings) -> PlacementPolicy:
        return cls(
            stream_tokens_min=settings.stream_tokens_min,
            fetch_tokens_min=settings.fetch_tokens_min,
            decode_first_share_min=settings.decode_first_share_min,
            decode_first_found_min=settings.decode_first_found_min,
        )


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What placement needs to know of a request."""

    model: str
    mode: Mode = Mode.AUTO
    unsplittable: str = ""
    """Why the request cannot be split; empty when it can."""
    prompt_tokens: int = 0
    hashes: Sequence[int] = ()
    """Block hashes of the prompt; empty when they could not be computed."""
    tokens_out: int = 0
    """The client's limit on each completion; 0: none."""
    sequences: int = 1
    """Completions or inputs that an engine computes for it."""
    excluded: frozenset[WorkerId] = frozenset()
    """Workers that have already failed this request."""
    fetch_tokens_min: int | None = None
    """The client's minimum of tokens to fetch; None: the operator's holds."""
    cache_hit_threshold: float | None = None
    """The client's threshold for a decode worker that serves alone; None: it set none."""
    may_decode_first: bool = True
    """Whether a decode worker may be asked to serve the request alone: not after one has refused."""
    forced: ForcedWorkers | None = None
    targets: Targets = NO_TARGETS
    tenant: str = ""
    priority: int = 0
    revisions: tuple[str, ...] = ()
    """Revisions that may serve it, the preferred one first (see ``revisions``); empty: any."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the request goes, and what is predicted for it."""

    mode: Mode
    decode: WorkerView
    """Serves the decode leg, or the whole request when there is no prefill worker."""
    prefill: WorkerView | None = None
    cached_tokens: int = 0
    """Tokens that the worker that computes the prompt is expected to have cached."""
    fetched_tokens: int = 0
    """Tokens that the worker that computes the prompt is expected to fetch from ``sources``."""
    uncached_tokens: int = 0
    """Tokens that are expected to be computed: the rest of the prompt."""
    context_tokens: int = 0
    """Prompt and completion, as far as they are known."""
    sources: tuple[KvSource, ...] = ()
    """Workers that the worker that computes the prompt asks for KV first."""
    handoff: tuple[KvSource, ...] = ()
    """The prefill worker, as the decode worker's source, if its connector can transfer KV by content."""
    streamed: bool = False
    """Both legs are dispatched together: the decode worker reads the KV while it is computed."""
    hit_share_min: float | None = None
    """A worker that has a smaller share of the prompt refuses the leg; after DECODE_FIRST the router disaggregates.
    0.0: it computes what it lacks, since no other worker could hand over KV. None: the client's threshold counts, or
    the worker's.
    """
    predicted: TtftParts = NOTHING_PREDICTED
    predicted_itl_s: float = 0.0
    step_s: float = 0.0
    """Decode step, with this request, of the worker that computes the prompt."""
    prompt_step_s: float = 0.0
    """What as many prompt tokens as it computes in one step add to it; 0: it decodes nothing, has not been measured, or
    the request has no target between tokens.
    """
    answer_step_s: float = 0.0
    """Decode step, with this request, of the worker that answers: ``predicted_itl_s`` without prompts in between."""
    why: str = ""
    considered: int = 0
    """Free workers that could have been chosen."""
    candidates: Iterable[PartCandidates] = ()
    """For each part that was weighed, the workers that could be best, and the chosen one."""

    def view(self, worker_id: WorkerId) -> WorkerView | None:
        """The worker of this id, if it is one of its workers."""
        for view in (self.decode, self.prefill):
            if view is not None and view.record.worker_id == worker_id:
                return view
        return None


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """No worker can serve the request now."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


def reject(request: PlacementRequest, cluster: ClusterView, *, busy: bool) -> Rejection:
    """The model is unknown, or its workers are full (``busy``), or none is ready. Without any worker, nothing is known:
    NATS may have lost the registry, which the workers fill again.
    """
    if request.model and cluster.workers and cluster.is_whole and not cluster.knows(request.model):
        message = f"The model `{request.model}` does not exist; /v1/models lists those that do."
        return Rejection(reason=Reason.MODEL_UNKNOWN, message=message)
    if busy:
        message = "All workers of this model are full. Try again shortly."
        return Rejection(reason=Reason.WORKER_BUSY, message=message, retry_after_s=RETRY_AFTER_S)
    message = "No worker of this model is ready. Try again shortly."
    return Rejection(reason=Reason.NO_WORKER, message=message, retry_after_s=RETRY_AFTER_S)


def reject_pair(request: PlacementRequest, *, busy: bool) -> Rejection:
    """No pair of workers can serve the request, or the workers of each pair are full (``busy``)."""
    reason = Reason.WORKER_BUSY if busy else Reason.NO_WORKER
    message = "No prefill and decode workers of the same fingerprint are ready for this model."
    if request.forced is not None:
        message = "The requested workers cannot serve this request together, or are not ready."
    if busy:
        message = "The workers that could serve this request are full. Try again shortly."
    return Rejection(reason=reason, message=message, retry_after_s=RETRY_AFTER_S)
