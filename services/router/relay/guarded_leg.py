"""A leg whose worker shall refuse what it would have to compute: its refusal is a failure, and no answer."""

from __future__ import annotations

from typing import Protocol

from shared.bus.leg_inbox import LegFailed
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import CACHE_THRESHOLD, Frame

REFUSED = b'"finish_reason":"%b"' % CACHE_THRESHOLD.encode()
"""In an event of the answer. Text that says so has its quotes escaped."""
MISSED = Failure(reason=Reason.CACHE_MISSED, message="The worker has too little of the prompt in its cache.")


class Frames(Protocol):
    """A leg, as far as its answer is read."""

    worker_id: WorkerId

    async def frames(self) -> list[Frame]:
        """See ``shared.bus.leg_inbox.Leg``."""


class GuardedLeg:
    """``frames`` ends before the refusal, which is raised as LegFailed."""

    def __init__(self, leg: Frames) -> None:
        self.worker_id = leg.worker_id
        self._leg = leg
        self._refused = False

    async def frames(self) -> list[Frame]:
        """As the leg's, up to a refusal. Raises LegFailed."""
        if not self._refused:
            frames = await self._leg.frames()
            good = next((number for number, frame in enumerate(frames) if is_refusal(frame)), len(frames))
            self._refused = good < len(frames)
            if good:
                return frames[:good]
        raise LegFailed(MISSED, self.worker_id)


def is_refusal(frame: Frame) -> bool:
    """Whether the worker says here that it had too little, at first or after a preemption."""
    return REFUSED in frame.data or (frame.report is not None and frame.report.finish_reason == CACHE_THRESHOLD)
