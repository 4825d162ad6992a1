"""Legs over the bus: a router starts a leg and reads its frames; a worker sends them, batched per router.

This is the hot path of the whole system. A router gets one ``FrameBatch`` per turn of a worker's loop, whatever the
number of streams, and does per frame one dictionary look-up and one append. A waiter is woken once per batch.
"""

from __future__ import annotations

from shared.bus.frame_sender import FrameSender, LegFrames, LegGone
from shared.bus.leg_inbox import Leg, LegFailed, LegInbox, Orphans

__all__ = ["FrameSender", "Leg", "LegFailed", "LegFrames", "LegGone", "LegInbox", "Orphans"]
