"""The leg that computes the prompt on a worker of its own. It ends with a report, and the client gets nothing of it."""

from __future__ import annotations

from typing import Final

from services.router.relay.running_leg import END, NO_HEAD, OK, EngineRefused, NotAnswered, RunningLeg, is_head
from shared.bus.leg_inbox import LegFailed
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import Frame

NO_REPORT: Final = Failure(reason=Reason.BAD_MESSAGE, message="The prefill leg ended without a report.")


class PrefillLeg(RunningLeg):
    """Reads to the report."""

    def read(self, frames: list[Frame]) -> None:
        self.frames += frames
        last = frames[-1]
        if last.kind is not END:
            return
        self.close(None)
        attempt, context = self.attempt, self.context
        head, report = self.frames[0], last.report
        if not is_head(head):
            attempt.prefill_failed(LegFailed(NO_HEAD))
        elif head.status != OK:
            attempt.prefill_failed(EngineRefused(self.start.worker_id, self.frames))
        elif report is None:
            attempt.prefill_failed(LegFailed(NO_REPORT))
        else:
            context.timings.prefill_s = prefill_s = self.services.now() - self.begun_at
            context.prefill_report = report
            self.learn(report, prefill_s)
            attempt.prefilled()

    def fail(self, error: NotAnswered) -> None:
        self.close(error)
        self.attempt.prefill_failed(error)
