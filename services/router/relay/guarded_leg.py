"""A leg whose worker may refuse to compute a prompt that it has too little of: the refusal is raised as a failure."""

from __future__ import annotations

from typing import Protocol

from shared.bus.leg_inbox import LegFailed
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import CACHE_THRESHOLD, Frame

REFUSED = b'"finish_reason":"%b"' % CACHE_THRESHOLD.encode()
"""As it stands in a refusing event. Generated text cannot imitate it: JSON escapes the quotes inside of text."""
MISSED = Failure(reason=Reason.CACHE_MISSED, message="The worker has too little of the prompt in its cache.")


class Frames(Protocol):
    """What a reader of a leg uses."""

    worker_id: WorkerId

    async def frames(self) -> list[Frame]:
        """See ``shared.bus.leg_inbox.Leg``."""


class GuardedLeg:
    """Passes frames on up to a refusal, which it raises as LegFailed."""

    def __init__(self, leg: Frames) -> None:
        self.worker_id = leg.worker_id
        self._leg = leg
        self._refused = False

    async def frames(self) -> list[Frame]:
        """The leg's frames. Raises LegFailed for a refusal, after the frames that came before it were read."""
        if not self._refused:
            frames = await self._leg.frames()
            good = next((number for number, frame in enumerate(frames) if is_refusal(frame)), len(frames))
            self._refused = good < len(frames)
            if good:
                return frames[:good]
        raise LegFailed(MISSED, self.worker_id)


def is_refusal(frame: Frame) -> bool:
    """Whether the worker refuses here, at the start or after a preemption."""
    return REFUSED in frame.data or (frame.report is not None and frame.report.finish_reason == CACHE_THRESHOLD)
