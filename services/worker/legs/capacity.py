"""Whether a leg may begin here."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch
from shared.contracts.inference import StartLeg
from shared.contracts.workers import WorkerPhase

BUSY_RETRY_S = 1.0
LEG_S_MAX = 7 * 86_400.0
"""That a router may give a leg; what is no number of seconds at all would stop every clock of this process."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What this life of the worker can take."""

    epoch: Epoch
    legs_max: int

    def refusal(self, start: StartLeg, phase: WorkerPhase, legs: int) -> Failure | None:
        """Why ``start`` is refused, or None. ``legs`` are being served just now."""
        if not 0.0 <= start.deadline_s <= LEG_S_MAX:
            message = f"a leg cannot have {start.deadline_s:g} s"
            return Failure(reason=Reason.BAD_MESSAGE, message=message)
        if start.epoch is not None and start.epoch != self.epoch:
            message = f"the leg was placed on life {start.epoch} of {start.worker_id}; this is life {self.epoch}"
            return Failure(reason=Reason.WORKER_LOST, message=message)
        if phase is not WorkerPhase.READY:
            message = f"{start.worker_id} is {phase.value} and takes no new legs"
            return Failure(reason=Reason.WORKER_DRAINING, message=message)
        if legs >= self.legs_max:
            message = f"{start.worker_id} serves {legs} legs already, as many as it may"
            return Failure(reason=Reason.WORKER_BUSY, message=message, retry_after_s=BUSY_RETRY_S)
        return None
