"""What is asked of a worker: the StartLeg of each leg, with what it is told about KV."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode
from services.router.relay.failure_policy import HANDOFF_SHARE_MIN
from services.router.relay.request_context import RequestContext
from shared.contracts.ids import LegId, RouterId
from shared.contracts.inference import LegKind, LegReport, StartLeg, pack_tokens

pack = msgspec.msgpack.Encoder().encode
NEVER_REFUSED = 0.0


class Starts:
    """Makes the legs of one router, each with a name of its own."""

    def __init__(self, router_id: RouterId, now: Callable[[], float], *, guards_handoffs: bool) -> None:
        self._router_id = router_id
        self._now = now
        self._guards_handoffs = guards_handoffs
        self._made = 0

    def make(
        self, flight: RequestContext, placed: Placement, kind: LegKind, prefill: LegReport | None = None
    ) -> StartLeg:
        """A leg of this placement; a decode leg with what its prefill leg reported, if that has ended."""
        self._made += 1
        exchange, facts, had = flight.exchange, flight.facts, flight.attempts.had
        view = placed.prefill if kind is LegKind.PREFILL and placed.prefill is not None else placed.decode
        return StartLeg(
            worker_id=view.record.worker_id,
            router_id=self._router_id,
            request_id=exchange.head.request_id,
            leg_id=LegId(f"{self._router_id}-{self._made}"),
            kind=kind,
            path=exchange.head.path,
            body=exchange.upload.body(),
            content_type=exchange.head.content_type,
            epoch=view.record.epoch,
            deadline_s=max(0.0, flight.ends_at - self._now()),
            kv_transfer=handed_over(prefill) if prefill is not None else b"",
            prefill_cached_tokens=prefill.cached_tokens if prefill is not None else 0,
            kv_offer=not placed.streamed,
            kv_sources=list(placed.handoff if kind is LegKind.DECODE else placed.sources),
            expected_tokens=placed.uncached_tokens if kind is not LegKind.DECODE else 0,
            cache_hit_threshold=self._threshold(flight, placed) if kind is not LegKind.PREFILL else None,
            kv_fetch_min_tokens=facts.kv_fetch_min_tokens,
            resume=pack_tokens(had.tokens) if exchange.begun else None,
            resume_joined=pack_tokens(had.joined),
            created=had.created,
            cache_salt=facts.salt,
        )

    def guards(self, flight: RequestContext, placed: Placement) -> bool:
        """Whether the decode worker shall refuse to compute what it does not get, unless its client says what share."""
        return self._guards_handoffs and placed.prefill is not None and flight.facts.cache_hit_threshold is None

    def _threshold(self, flight: RequestContext, placed: Placement) -> float | None:
        """Below which share of the prompt its worker shall refuse: the client's, or what placement counts on. A stream
        that has begun is not refused for the client's sake any more.
        """
        if placed.mode is Mode.DECODE_FIRST:
            return placed.hit_share_min
        if self.guards(flight, placed):
            return HANDOFF_SHARE_MIN
        return NEVER_REFUSED if flight.exchange.begun else flight.facts.cache_hit_threshold


def handed_over(prefill: LegReport) -> bytes:
    """The KV that a prefill leg left, as its decode leg is told of it: a KvOffer, or what upstream's connector said."""
    if prefill.kv is not None and prefill.kv.offer is not None:
        return pack(prefill.kv.offer)
    return prefill.kv_transfer
