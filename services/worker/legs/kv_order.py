"""The engine's order about KV for each leg."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.contracts.inference import LegKind, StartLeg
from shared.contracts.kv_exchange import KvOffer, LegOrder

_offer = msgspec.msgpack.Decoder(KvOffer)


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Defaults of this worker; a request may override them."""

    cache_hit_threshold: float = 0.0
    fetch_min_tokens: int = 0

    def order(self, start: StartLeg, *, is_plain: bool, answers: bool) -> LegOrder:
        """``is_plain``: KV may be moved for it. ``answers``: a response on its path can report that the threshold was
        not met; a resumed stream cannot any more.
        """
        threshold = self.cache_hit_threshold if start.cache_hit_threshold is None else start.cache_hit_threshold
        least = self.fetch_min_tokens if start.kv_fetch_min_tokens is None else start.kv_fetch_min_tokens
        is_exempt = start.kind is LegKind.PREFILL or not answers or start.resume is not None
        offers = is_plain and start.kind is LegKind.PREFILL and start.kv_offer
        moves = LegOrder(
            offer=offers,
            offer_id=start.leg_id if offers else "",
            take=read_offer(start.kv_transfer) if is_plain and start.kind is LegKind.DECODE else None,
            sources=start.kv_sources if is_plain else [],
            cache_hit_threshold=0.0 if is_exempt else threshold,
            fetch_min_tokens=least,
        )
        return msgspec.structs.replace(moves, wait_s_max=min(moves.wait_s_max, start.deadline_s))


def moves_kv(start: StartLeg) -> bool:
    """Whether KV may be moved for the leg."""
    return start.kind is LegKind.PREFILL or bool(start.kv_transfer or start.kv_sources)


def read_offer(packed: bytes) -> KvOffer | None:
    """None for an unreadable offer: the prompt is computed."""
    try:
        return _offer.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
