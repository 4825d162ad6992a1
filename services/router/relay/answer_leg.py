"""The leg that answers. Its first frames decide whether the response is a stream or whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from services.router.relay.running_leg import DATA, END, NO_HEAD, OK, LegServices, NotAnswered, RunningLeg, is_head
from services.router.relay.start_leg import asked_threshold, is_refusal, threshold_from
from services.router.relay.stream_answer import StreamAnswer
from services.router.relay.whole_answer import WholeAnswer
from services.router.request.errors import EVENT_STREAM
from services.router.request.facts import Mode
from shared.bus.leg_inbox import Leg, LegFailed
from shared.contracts.engine_paths import MESSAGES, RESPONSES
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import Frame, StartLeg

if TYPE_CHECKING:
    from services.router.placement.placement import Placement
    from services.router.relay.attempt import Attempt

DECODE_FIRST: Final = Mode.DECODE_FIRST
MISSED: Final = Failure(reason=Reason.CACHE_MISSED, message="The worker has too little of the prompt in its cache.")
BELOW_THRESHOLD: Final = Failure(
    reason=Reason.BELOW_THRESHOLD,
    message="Less of the prompt is cached, or can be fetched, than `cache_hit_threshold` asks for.",
)

SILENT_PATHS: Final = frozenset((MESSAGES, RESPONSES))
"""Paths whose responses have no finish reason for a refused request."""
BAD_TOKENS: Final = Failure(reason=Reason.BAD_MESSAGE, message="The worker sent token ids that are none.")


class AnswerLeg(RunningLeg):
    """Passes the response on to the client, as ``StreamAnswer`` or as ``WholeAnswer``."""

    def __init__(self, services: LegServices, attempt: Attempt, start: StartLeg) -> None:
        super().__init__(services, attempt, start)
        placement = attempt.placement
        self._refusal = self._refusal_of(services, placement)
        """What a refusal of the worker, to compute the prompt, means here; None: its response tells the client."""
        self._refused = False
        """The worker has refused; its report is still to come."""
        decision = self.context.decision
        if decision is not None:
            decision.threshold, decision.threshold_from = threshold_from(self.context, placement, start)
        self._stream: StreamAnswer | None = None
        self._whole: WholeAnswer | None = None
        self._waiting = False
        """Nothing is relayed until the client has read."""

    def waits(self, leg: Leg) -> bool:
        if self._waiting:
            return True
        if self._stream is None or leg.ended or not self.context.http_request.is_blocked():
            return False
        self._waiting = True
        self.services.tasks.spawn(self.context, self._until_read(), "wait-for-client")
        return True

    async def _until_read(self) -> None:
        await self.context.http_request.drained()
        self.resume()

    def resume(self) -> None:
        """What it waited for has come: the client has read, or all streams write."""
        self._waiting = False
        leg = self._leg
        if leg is None:
            return
        leg.held = False
        try:
            self.leg_changed(leg)
        except Exception as bug:
            self.leg_crashed(bug)

    def read(self, frames: list[Frame]) -> None:
        last = frames[-1]
        if self._refused:
            frames = []
        elif self._refusal is not None:
            good = next((number for number, frame in enumerate(frames) if is_refusal(frame)), len(frames))
            self._refused = good < len(frames)
            frames = frames[:good]
        if frames and self._stream is not None:
            self._relay(self._stream, frames)
        elif frames and self._whole is not None:
            self._whole.add(frames)
            self._collect(self._whole, frames[-1])
        elif frames:
            self._decide(frames)
        if self._refused and last.kind is END and not self.over:
            if self.context.decision is not None:
                self.context.decision.note_hit_share(last.report)
            self._give_up_refused()

    def _give_up_refused(self) -> None:
        assert self._refusal is not None
        self.fail(LegFailed(self._refusal, self.start.worker_id))

    def _refusal_of(self, services: LegServices, placement: Placement) -> Failure | None:
        context = self.context
        is_default = self.start.cache_hit_threshold is None
        if is_default or placement.mode is DECODE_FIRST or services.starter.guards(context, placement):
            return MISSED
        return BELOW_THRESHOLD if asked_threshold(context) and context.facts.path in SILENT_PATHS else None

    def _decide(self, more: list[Frame]) -> None:
        """Find out what the response is, when the worker can no longer refuse: a refusal comes after the head, and
        before or instead of the first token. DATA frames without data say that tokens have come.
        """
        frames = self.frames + more
        head, last = frames[0], frames[-1]
        if self._refusal is not None and last.kind is not END and not any(map(tells_of_token, frames)):
            self.frames = frames
            return
        self.frames = []
        if not is_head(head):
            self.fail(LegFailed(NO_HEAD))
        elif head.status == OK and head.content_type.startswith(EVENT_STREAM):
            stream = self._stream = StreamAnswer(self.services, self.context, self.attempt.placement, self.load)
            self._relay(stream, frames)
        else:
            whole = self._whole = WholeAnswer(self.services, self.context, self.start.worker_id, frames)
            self._collect(whole, last)

    def _relay(self, stream: StreamAnswer, frames: list[Frame]) -> None:
        try:
            rest = stream.relay(frames)
        except OverflowError:
            if self._leg is not None:
                self._leg.cancel()
            self.fail(LegFailed(BAD_TOKENS, self.start.worker_id))
            return
        if rest is not None:
            self._end_stream(stream, rest)
        elif stream.must_wait and self._leg is not None:
            self._leg.held = True
            self.services.coalescer.add(self.resume)

    def _end_stream(self, stream: StreamAnswer, data: bytes) -> None:
        self.close(None)
        self.context.http_request.end(data)
        self.learn(self.context.report, stream.first_at - self.begun_at)
        self.attempt.answered()

    def _collect(self, whole: WholeAnswer, last: Frame) -> None:
        error = whole.error()
        if error is not None:
            self.fail(error)
        elif last.kind is END:
            self.close(None)
            whole.send(self.attempt.placement)
            self.learn(last.report, None)
            self.attempt.answered()

    def broke(self, error: LegFailed) -> None:
        if self._refused:
            self._give_up_refused()
        elif self._stream is not None and self._stream.is_complete():
            self.context.report = None
            self._end_stream(self._stream, b"")
        else:
            self.fail(error)

    def fail(self, error: NotAnswered) -> None:
        self.close(error)
        self.attempt.answer_failed(error)

    def close(self, error: Exception | None) -> None:
        super().close(error)
        if self._stream is not None:
            self.services.coalescer.leave()


def tells_of_token(frame: Frame) -> bool:
    """Whether the engine has generated a token by then."""
    return bool(frame.token_ids) or (frame.kind is DATA and not frame.data)
