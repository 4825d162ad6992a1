"""Reservations: routers exchange recent placements, so that they do not all choose the same worker."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.message import Message

ANNOUNCE_S = 2.0
"""Longest interval between messages of a router. A single router publishes no reservations."""


class Reservation(Message, frozen=True, kw_only=True):
    """Work that a router has just sent to a worker; it counts until the worker's next load report, which has it."""

    worker_id: WorkerId
    epoch: Epoch
    legs: int = 1
    tokens: int = 0
    """Prompt tokens to compute."""
    context_tokens: int = 0
    """Prompt and expected completion, that will lie in its KV cache."""


class Quarantined(Message, frozen=True, kw_only=True):
    """A request that an engine may have died of: no router should place it."""

    digest: bytes
    """Of its body, 16 bytes."""
    for_s: float
    """Seconds from now."""


class Reservations(Message, frozen=True, kw_only=True):
    """Router -> routers: what it has placed since its last such message; with nothing in it, a sign of life. ``seq``
    counts from 1.
    """

    router_id: RouterId
    seq: int
    made: list[Reservation]
    quarantined: list[Quarantined] = msgspec.field(default_factory=list)
