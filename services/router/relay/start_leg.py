"""Makes the StartLeg message of each leg, with what the worker must know about KV.

Also recognises the refusal of a worker to compute a prompt that it has too little of, and counts the load that the
router's own legs add to their workers, until the workers' load reports include it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from services.router.feeds.reservations import ReservationFeed
from services.router.placement.placement import Placement
from services.router.relay.failure_policy import HANDOFF_SHARE_MIN
from services.router.request.context import RequestContext
from services.router.request.facts import Mode
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import Sent
from shared.contracts.ids import LegId, RouterId
from shared.contracts.inference import CACHE_THRESHOLD, Frame, LegKind, LegReport, StartLeg, pack_tokens
from shared.runtime.random_ids import RandomIds

PREFILL: Final = LegKind.PREFILL
DECODE: Final = LegKind.DECODE
AGGREGATED: Final = LegKind.AGGREGATED
DECODE_FIRST: Final = Mode.DECODE_FIRST
DISAGGREGATED: Final = Mode.DISAGGREGATED

pack = msgspec.msgpack.Encoder().encode
NEVER_REFUSED: Final = 0.0
BY_REQUEST: Final = "request"
WORKER_DEFAULT: Final = "worker_default"
BY_DECODE_FIRST: Final = "decode_first"
BY_FAILURE_POLICY: Final = "failure_policy"
ID_BYTES: Final = 16
REFUSED: Final = b'"finish_reason":"%b"' % CACHE_THRESHOLD.encode()
"""What a refusing event contains. Generated text cannot imitate it: JSON escapes the quotes inside of text."""


class LegStarter:
    """Makes the legs of one router, each with a random id: a worker cannot guess the legs of another."""

    def __init__(
        self, router_id: RouterId, now: Callable[[], float], *, guards_handoffs: bool, attempts_max: int
    ) -> None:
        self._router_id = router_id
        self._now = now
        self._guards_handoffs = guards_handoffs
        self._attempts_max = attempts_max
        self._leg_ids = RandomIds(ID_BYTES)

    def make(
        self, context: RequestContext, placement: Placement, kind: LegKind, *, beside: LegId | None = None
    ) -> StartLeg:
        """A leg of this placement. ``beside``: the prefill leg that runs at the same time as this decode leg; a prefill
        leg that has ended has its report in the context.
        """
        http_request, facts, prefill = context.http_request, context.facts, context.prefill_report
        sources = list(placement.handoff if kind is DECODE else placement.sources)
        resumes = http_request.begun
        if beside is not None:
            sources = [msgspec.structs.replace(source, leg_id=beside) for source in sources]
        view = placement.prefill if kind is PREFILL and placement.prefill is not None else placement.decode
        return StartLeg(
            worker_id=view.record.worker_id,
            router_id=self._router_id,
            request_id=http_request.head.request_id,
            leg_id=LegId(self._leg_ids.next()),
            kind=kind,
            path=http_request.head.path,
            body=http_request.upload.body(),
            content_type=http_request.head.content_type,
            epoch=view.record.epoch,
            deadline_s=max(0.0, context.ends_at - self._now()),
            kv_transfer=kv_transfer_of(prefill) if prefill is not None else b"",
            prefill_cached_tokens=prefill.cached_tokens if prefill is not None else 0,
            kv_offer=not placement.streamed,
            kv_sources=sources,
            expected_tokens=placement.uncached_tokens if kind is not DECODE else 0,
            cache_hit_threshold=self._threshold(context, placement, kind),
            kv_fetch_min_tokens=facts.kv_fetch_min_tokens,
            itl_target_s=max(0.0, context.decision.itl_target_s) if context.decision is not None else 0.0,
            resume=pack_tokens(context.relayed) if resumes else None,
            resume_joined=pack_tokens(context.joined) if resumes else b"",
            cached_tokens=context.cached_tokens if resumes else None,
            created=context.created,
            answer_id=context.answer_id,
            cache_salt=facts.salt,
            media_salt=facts.media_salt,
            sequences=facts.sequences,
        )

    def guards(self, context: RequestContext, placement: Placement) -> bool:
        """Whether the decode worker must refuse a handoff that fails, instead of computing the prompt itself. A client
        that has set ``cache_hit_threshold`` has decided this itself.
        """
        return self._guards_handoffs and placement.prefill is not None and asked_threshold(context) is None

    def _threshold(self, context: RequestContext, placement: Placement, kind: LegKind) -> float | None:
        """The share of the prompt below which the worker refuses: placement's, the failure policy's, or the client's,
        which no longer counts when its stream has begun. The worker's own, None, counts only where its refusal can be
        mended: KV that is handed over is no reason to refuse, and the last attempt answers the client.
        """
        if kind is PREFILL:
            return NEVER_REFUSED
        if placement.hit_share_min is not None:
            return placement.hit_share_min
        if self.guards(context, placement):
            return HANDOFF_SHARE_MIN
        if context.http_request.begun:
            return NEVER_REFUSED
        asked = asked_threshold(context)
        if asked is not None or not placement.decode.record.cache_hit_threshold:
            return asked or NEVER_REFUSED
        is_mended = kind is AGGREGATED and context.attempts == 1 and context.may_retry(self._attempts_max)
        return None if is_mended and not rules_out_one_worker(context) else NEVER_REFUSED


def asked_threshold(context: RequestContext) -> float | None:
    """The client's threshold; None where it set none, or a worker has refused the request by it."""
    return context.request.cache_hit_threshold if context.request is not None else None


def rules_out_one_worker(context: RequestContext) -> bool:
    """Whether the client wants two workers, so that after a refusal no worker may serve the request alone."""
    return context.request is not None and context.request.mode is DISAGGREGATED


def threshold_from(context: RequestContext, placement: Placement, start: StartLeg) -> tuple[float, str]:
    """The share of the prompt below which the worker refuses the leg, and who set it; -1.0 and nobody without one."""
    share = start.cache_hit_threshold
    if share is None:
        return placement.decode.record.cache_hit_threshold, WORKER_DEFAULT
    if not share:
        return -1.0, ""
    if asked_threshold(context) == share:
        return share, BY_REQUEST
    return share, BY_DECODE_FIRST if placement.mode is DECODE_FIRST else BY_FAILURE_POLICY


def kv_transfer_of(prefill: LegReport) -> bytes:
    """Where the decode leg finds the prefill leg's KV: a packed KvOffer, or the parameters of vLLM's own connector."""
    if prefill.kv is not None and prefill.kv.offer is not None:
        return pack(prefill.kv.offer)
    return prefill.kv_transfer


def is_refusal(frame: Frame) -> bool:
    """Whether the worker refuses here, at the start or after a preemption."""
    return REFUSED in frame.data or (frame.report is not None and frame.report.finish_reason == CACHE_THRESHOLD)


@dataclass(frozen=True)
class LegLoads:
    """Counts legs in the cluster view and announces them to the other routers."""

    cluster: ClusterView
    reservations: ReservationFeed
    load_changed: Callable[[], None]
    now: Callable[[], float]


class LegLoad:
    """One leg's load, from its start to ``ended``: its context while it runs, and its prompt until that is computed."""

    def __init__(self, loads: LegLoads, start: StartLeg, context_tokens: int, hashes: Sequence[int]) -> None:
        """``hashes``: of the prompt's blocks. Those that running legs hold on the worker take no further space."""
        self._loads = loads
        self._start = start
        self._prompt_tokens = max(0, start.expected_tokens)
        self._context_tokens = max(0, context_tokens - loads.cluster.shared_tokens(start.worker_id, hashes))
        self._legs = start.sequences
        self._sent = Sent(loads.now(), self._prompt_tokens, self._context_tokens, self._legs, hashes)
        loads.cluster.leg_started(start.worker_id, self._sent)

    def sent(self) -> None:
        """The leg's message has left for its worker: announce it to the other routers."""
        self._loads.reservations.leg_started(self._start, self._context_tokens)

    def prompt_computed(self) -> None:
        """The leg's first token has arrived."""
        self._loads.cluster.prompt_computed(self._start.worker_id, self._sent, self._prompt_tokens)
        self._prompt_tokens = 0
        self._loads.load_changed()

    def ended(self) -> None:
        """The leg is over."""
        worker_id, tokens = self._start.worker_id, self._prompt_tokens
        self._loads.cluster.leg_ended(worker_id, self._sent, self._context_tokens, self._legs, tokens)
        self._loads.load_changed()
