"""Whether a leg may start on this worker."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch
from shared.contracts.inference import StartLeg
from shared.contracts.workers import WorkerPhase

BUSY_RETRY_S = 1.0
LEG_S_MAX = 7 * 86_400.0
"""Longest deadline of a leg. A NaN or an infinite one would break the timers of this process."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of this process of the worker."""

    epoch: Epoch
    legs_max: int

    def refusal(self, start: StartLeg, phase: WorkerPhase, sequences: int) -> Failure | None:
        """Why ``start`` is refused, or None. ``sequences`` are being served now. The last leg that is taken may exceed
        the maximum with its sequences, so that one with more than the maximum can be served at all.
        """
        if not 0.0 <= start.deadline_s <= LEG_S_MAX:
            message = f"a leg cannot have a deadline of {start.deadline_s:g} s"
            return Failure(reason=Reason.BAD_MESSAGE, message=message)
        if start.epoch is not None and start.epoch != self.epoch:
            message = f"the leg was placed on epoch {start.epoch} of {start.worker_id}; this is epoch {self.epoch}"
            return Failure(reason=Reason.WORKER_LOST, message=message)
        if phase is not WorkerPhase.READY:
            message = f"{start.worker_id} is {phase.value} and takes no new legs"
            return Failure(reason=Reason.WORKER_DRAINING, message=message)
        if sequences >= self.legs_max:
            message = f"{start.worker_id} serves {sequences} sequences already; its maximum is {self.legs_max}"
            return Failure(reason=Reason.WORKER_BUSY, message=message, retry_after_s=BUSY_RETRY_S)
        return None
