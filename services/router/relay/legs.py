"""Runs the legs of a placed request: the prefill leg to its report, the answering leg to the client.

Everything here is called back: by the inbox when a leg's frames have come, by timers, by the client's connection. A
coroutine for each leg would cost more than all that it does. Only what must wait for the bus or the client is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.router.placement.placement import Placement
from services.router.relay.migration import ATTACHED
from services.router.relay.request_tasks import RequestTasks
from services.router.relay.start_leg import LegLoad, LegLoads, LegStarter, is_refusal
from services.router.relay.write_coalescer import WriteCoalescer
from services.router.request.context import RequestContext, ResponseHeaders
from services.router.request.errors import EVENT_STREAM
from services.router.request.facts import Mode
from services.router.request.timings import NOT_BROKEN
from services.router.settings import Settings
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.telemetry.request_log import RequestLog
from services.router.telemetry.tracing import Tracing
from shared.bus.leg_inbox import Leg, LegFailed, LegInbox, LegReader
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import Frame, FrameKind, LegKind, LegReport, StartLeg
from shared.telemetry.span_names import SpanName

PREFILL: Final = LegKind.PREFILL
DECODE: Final = LegKind.DECODE
AGGREGATED: Final = LegKind.AGGREGATED
DECODE_FIRST: Final = Mode.DECODE_FIRST

HEAD: Final = FrameKind.HEAD
END: Final = FrameKind.END
OK: Final = 200
STATUS_MAX: Final = 599
REPORT_S_MAX: Final = 1.0
"""How long a complete response waits for its prefill leg to end: only that leg's report is missing then."""
REFUSAL_BYTES_MAX: Final = 500
"""Of an engine's error body that are quoted in a stream's last event."""
STEP_SHARE_MAX: Final = 0.5
"""Of a request's remaining time, for one step that may be retried: the rest is for the retry."""
LAST_EVENTS: Final = (b"data: [DONE]", b"event: message_stop\n", b"event: response.completed\n")
"""A stream that ends with one of them is complete, whatever happens to its leg afterwards."""
EVENT_END: Final = b"\n\n"
OTHER_LEG_OVER: Final = Failure(reason=Reason.CANCELLED, message="the leg beside it is over")
MISSED: Final = Failure(reason=Reason.CACHE_MISSED, message="The worker has too little of the prompt in its cache.")
NO_HEAD: Final = Failure(reason=Reason.BAD_MESSAGE, message="The leg's answer does not begin with a head.")
NO_REPORT: Final = Failure(reason=Reason.BAD_MESSAGE, message="The prefill leg ended without a report.")
NO_STREAM: Final = Failure(
    reason=Reason.BAD_MESSAGE, message="The worker that took over the stream did not answer with a stream."
)
TOO_LARGE: Final = Failure(reason=Reason.INTERNAL, message="The answer is larger than the router holds.")


class EngineRefused(Exception):
    """The engine answered a leg with an HTTP error of its own, which is passed on to the client unchanged."""

    def __init__(self, worker_id: WorkerId, frames: list[Frame]) -> None:
        head = frames[0]
        super().__init__(f"status {head.status}")
        self.worker_id = worker_id
        self.status = head.status
        self.content_type = head.content_type
        self.body = b"".join([frame.data for frame in frames])

    def as_text(self) -> str:
        """For the client of a stream, whose status has already been sent."""
        return (
            f"The engine refused to continue ({self.status}): {self.body[:REFUSAL_BYTES_MAX].decode(errors='replace')}"
        )


NotAnswered = LegFailed | EngineRefused | BusDown | MessageTooLarge
"""Why an attempt did not give the client its response."""


class LegRunner:
    """Starts the legs of all requests. A request's ``deadline_at`` bounds every wait."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        *,
        settings: Settings,
        now: Callable[[], float],
        inbox: LegInbox,
        starter: LegStarter,
        loads: LegLoads,
        speeds: WorkerSpeeds,
        tracing: Tracing,
        request_log: RequestLog,
        response_headers: ResponseHeaders,
        tasks: RequestTasks,
    ) -> None:
        self.settings = settings
        self.now = now
        self.inbox = inbox
        self.starter = starter
        self.loads = loads
        self.speeds = speeds
        self.tracing = tracing
        self.request_log = request_log
        self.gaps = request_log.metrics.gaps
        self.headers = response_headers.of
        self.coalescer = WriteCoalescer(settings.write_wait_s_max)
        self.loop = asyncio.get_running_loop()
        self.tasks = tasks

    def run(
        self,
        context: RequestContext,
        placement: Placement,
        over: Callable[[RequestContext, NotAnswered | None], None],
        crashed: Callable[[RequestContext, Exception], None],
    ) -> None:
        """Run all legs of this placement. ``over`` is called once at their end, perhaps before this returns: with None
        when the client has its response. ``crashed`` is called for a bug.
        """
        Attempt(self, context, placement, over, crashed).begin()

    def allow_prefill(self, context: RequestContext) -> None:
        """The next step ends with the prefill leg."""
        self._allow(context, self.settings.prefill_s_max)

    def allow_answer(self, context: RequestContext) -> None:
        """The next step ends with the response's first frame."""
        if context.facts.stream:
            self._allow(context, self.settings.first_frame_s_max)
        else:  # An engine sends the head of a response that is no stream with its body, when all tokens are there.
            context.allow(self.now(), self.settings.request_s_max)

    def _allow(self, context: RequestContext, step_s_max: float) -> None:
        now, may_fail = self.now(), context.may_retry(self.settings.attempts_max)
        context.allow(now, step_s(context.ends_at - now, step_s_max, may_fail=may_fail))


class Attempt:
    """One placement of a request, while its legs run."""

    def __init__(
        self,
        runner: LegRunner,
        context: RequestContext,
        placement: Placement,
        over: Callable[[RequestContext, NotAnswered | None], None],
        crashed: Callable[[RequestContext, Exception], None],
    ) -> None:
        self.runner = runner
        self.context = context
        self.placement = placement
        self._over = over
        self._crashed = crashed
        self._prefill: PrefillLeg | None = None
        """Until it is over."""
        self._answer: AnswerLeg | None = None
        """Likewise."""
        self._cause: NotAnswered | None = None
        """Of a prefill leg beside the answering one: its failure, if that is why the request cannot be answered."""
        self._result: NotAnswered | None = None
        """Why the answering leg failed, while the other one has not ended."""
        self._patience: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the first leg, or both."""
        runner, context, placement = self.runner, self.context, self.placement
        if placement.prefill is None:
            runner.allow_answer(context)
            self._start_answer(runner.starter.make(context, placement, AGGREGATED))
            return
        runner.allow_prefill(context)
        start = runner.starter.make(context, placement, PREFILL)
        self._prefill = prefill = PrefillLeg(self, start)
        if not placement.streamed:
            prefill.open()
            return
        # Side by side: the decode worker reads the KV as the prefill worker computes it.
        decode = runner.starter.make(context, placement, DECODE, beside=start.leg_id)
        self._answer = AnswerLeg(self, decode)
        runner.inbox.hold()
        try:
            prefill.open()
            if self._answer is not None:
                self._answer.open()
        finally:
            runner.inbox.release()

    def prefilled(self, report: LegReport) -> None:
        """The prefill leg is complete."""
        self._prefill = None
        if not self.placement.streamed:
            self.runner.allow_answer(self.context)
            self._start_answer(self.runner.starter.make(self.context, self.placement, DECODE, report))
        elif self._answer is None:
            self._end(self._result)
        elif not self.context.answering:
            self.runner.allow_answer(self.context)

    def prefill_failed(self, error: NotAnswered) -> None:
        """The prefill leg has failed. That stops the decode leg beside it, unless that has begun to answer: then it has
        all the KV that it needs.
        """
        self._prefill = None
        context = self.context
        if not self.placement.streamed:
            self._end(error)
            return
        if self._answer is None:
            self._end(self._result)
            return
        beside = any(leg.unread for leg in context.legs)
        if not (context.answering or context.stopped is OTHER_LEG_OVER or beside):
            self._cause = error
            context.stop(OTHER_LEG_OVER)

    def answered(self) -> None:
        """The client has its response."""
        self._answer = None
        if self.placement.streamed:
            self.context.timings.answered_at = self.runner.now()
        if self._prefill is None:
            self._end(None)
            return
        # Only the report of the prefill leg is missing.
        if self.context.decision is not None:
            self.context.decision.answered = True
        self._patience = self.runner.loop.call_later(REPORT_S_MAX, self.context.stop, OTHER_LEG_OVER)

    def answer_failed(self, error: NotAnswered) -> None:
        """The answering leg has failed."""
        self._answer = None
        context = self.context
        if self.placement.streamed:
            context.stop(OTHER_LEG_OVER)
        self._result = self._cause if self._cause is not None and not context.answering else error
        if self._prefill is None:
            self._end(self._result)

    def crashed(self, bug: Exception) -> None:
        """A bug ends the attempt."""
        self._cancel_patience()
        for leg in (self._prefill, self._answer):
            if leg is not None:
                leg.drop()
        self._prefill = self._answer = None
        self._crashed(self.context, bug)

    def _start_answer(self, start: StartLeg) -> None:
        self._answer = AnswerLeg(self, start)
        self._answer.open()

    def _end(self, error: NotAnswered | None) -> None:
        self._cancel_patience()
        self._over(self.context, error)

    def _cancel_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


class RunningLeg(LegReader):
    """One leg from its start to its end, with its load on the worker and its times."""

    def __init__(self, attempt: Attempt, start: StartLeg) -> None:
        runner, context = attempt.runner, attempt.context
        self.attempt = attempt
        self.start = start
        self.begun_at = runner.now()
        self.over = False
        self._leg: Leg | None = None
        self._load = LegLoad(runner.loads, start, attempt.placement.context_tokens)
        self._times = runner.tracing.leg(context, start)

    def open(self) -> None:
        """Send the leg to its worker."""
        context, runner = self.attempt.context, self.attempt.runner
        if context.stopped is not None:
            self.fail(LegFailed(context.stopped))
            return
        times, head = self._times, context.http_request.head
        headers = head.trace if times is None else times.headers()
        try:
            leg = runner.inbox.start_now(self.start, self, headers)
        except (BusDown, MessageTooLarge) as error:
            self.fail(error)
            return
        if leg is None:
            runner.tasks.spawn(context, self._open_later(headers), "start-leg")
        else:
            self._opened(leg)

    async def _open_later(self, headers: dict[str, str] | None) -> None:
        try:
            self._opened(await self.attempt.runner.inbox.start(self.start, self, headers))
        except (BusDown, MessageTooLarge) as error:
            self.fail(error)
        except Exception as bug:
            self.leg_crashed(bug)

    def _opened(self, leg: Leg) -> None:
        self._leg = leg
        self._load.sent()
        self.attempt.context.started(leg)
        if leg.unread or leg.has_failed:  # It was answered while the message was being sent.
            self.leg_changed(leg)

    def leg_changed(self, leg: Leg) -> None:
        """See ``LegReader``."""
        if self.over or self._leg is None or self.waits(leg):
            return
        frames = leg.frames()
        if frames:
            self.read(frames)
        if leg.has_failed and not self.over:
            self.broke(leg.failure())

    def leg_crashed(self, bug: Exception) -> None:
        """See ``LegReader``."""
        self.attempt.crashed(bug)

    def resume(self) -> None:
        """What it waited for has come."""
        if self._leg is None:
            return
        try:
            self.leg_changed(self._leg)
        except Exception as bug:
            self.leg_crashed(bug)

    def waits(self, leg: Leg) -> bool:
        """Whether frames are left in the leg for now; ``resume`` must follow."""
        del leg
        return False

    def read(self, frames: list[Frame]) -> None:
        """The next frames, at least one."""
        raise NotImplementedError

    def broke(self, error: LegFailed) -> None:
        """The leg has ended without an END frame."""
        self.fail(error)

    def fail(self, error: NotAnswered) -> None:
        """It ends without its result."""
        raise NotImplementedError

    def close(self, error: Exception | None) -> None:
        """It is over: its load counts no more."""
        self.over, self._leg = True, None
        if self._times is not None:
            self._times.ended(self.attempt.runner.now(), error)
        self._load.ended()

    def drop(self) -> None:
        """Its request has ended with an internal error."""
        if not self.over:
            self.close(None)

    def _learn(self, report: LegReport | None, took_s: float | None) -> None:
        self.attempt.runner.speeds.leg_ended(self.start.worker_id, self.start.epoch, report, took_s)


class PrefillLeg(RunningLeg):
    """Reads to the report."""

    def __init__(self, attempt: Attempt, start: StartLeg) -> None:
        super().__init__(attempt, start)
        self._frames: list[Frame] = []

    def read(self, frames: list[Frame]) -> None:
        self._frames += frames
        last = frames[-1]
        if last.kind is not END:
            return
        self.close(None)
        attempt, context = self.attempt, self.attempt.context
        head, report = self._frames[0], last.report
        if not is_head(head):
            attempt.prefill_failed(LegFailed(NO_HEAD))
        elif head.status != OK:
            attempt.prefill_failed(EngineRefused(self.start.worker_id, self._frames))
        elif report is None:
            attempt.prefill_failed(LegFailed(NO_REPORT))
        else:
            context.timings.prefill_s = prefill_s = attempt.runner.now() - self.begun_at
            context.prefill_report = report
            self._learn(report, prefill_s)
            attempt.prefilled(report)

    def fail(self, error: NotAnswered) -> None:
        self.close(error)
        self.attempt.prefill_failed(error)


class AnswerLeg(RunningLeg):
    """Passes the response on to the client: a stream as it arrives, another one as a whole."""

    def __init__(self, attempt: Attempt, start: StartLeg) -> None:
        super().__init__(attempt, start)
        runner, context, placement = attempt.runner, attempt.context, attempt.placement
        self._guarded = placement.mode is DECODE_FIRST or runner.starter.guards(context, placement)
        """The worker may refuse to compute the prompt."""
        self._refused = False
        self._is_stream = False
        self._is_whole = False
        """Neither: it is not known yet."""
        self._collected: list[Frame] = []
        """Frames of a whole response, or those after which it is known what it is."""
        self._size = 0
        self._waiting = False
        """For the client to read."""
        self._gaps = runner.gaps.of[placement.mode].noted
        self._data = b""
        """The newest data of the stream."""
        self._written_at = self._first_at = 0.0
        self._is_awaited = True
        """Its first data has not come."""
        self._is_uncounted = context.cached_tokens is None

    def waits(self, leg: Leg) -> bool:
        if self._waiting:
            return True
        if not self._is_stream or leg.ended or not self.attempt.context.http_request.is_blocked():
            return False
        self._waiting = True
        self.attempt.runner.tasks.spawn(self.attempt.context, self._until_read(), "wait-for-client")
        return True

    async def _until_read(self) -> None:
        await self.attempt.context.http_request.drained()
        self.resume()

    def resume(self) -> None:
        self._waiting = False
        if self._leg is not None:
            self._leg.held = False
        super().resume()

    def read(self, frames: list[Frame]) -> None:
        if self._guarded:
            good = next((number for number, frame in enumerate(frames) if is_refusal(frame)), len(frames))
            self._refused = good < len(frames)
            frames = frames[:good]
        if frames:
            self._take(frames)
        if self._refused and not self.over:
            self.broke(LegFailed(MISSED, self.start.worker_id))

    def broke(self, error: LegFailed) -> None:
        if self._is_stream and is_complete(self._data):
            self.attempt.context.report = None
            self._end_stream(b"")
        else:
            self.fail(error)

    def fail(self, error: NotAnswered) -> None:
        self.close(error)
        self.attempt.answer_failed(error)

    def close(self, error: Exception | None) -> None:
        super().close(error)
        if self._is_stream:
            self.attempt.runner.coalescer.leave()

    def _take(self, frames: list[Frame]) -> None:
        if self._is_stream:
            self._relay(frames)
            return
        for frame in frames:
            self._size += len(frame.data)
        if self._is_whole:
            self._collected += frames
            if self._size > self.attempt.runner.settings.answer_bytes_max:
                self.fail(LegFailed(TOO_LARGE))
            else:
                self._collect(frames[-1])
            return
        self._collected = collected = self._collected + frames
        # A refusal comes after the head, and before or instead of the first token.
        if self._guarded and frames[-1].kind is not END and not any(frame.token_ids for frame in collected):
            return
        head = collected[0]
        if not is_head(head):
            self.fail(LegFailed(NO_HEAD))
        elif head.status == OK and head.content_type.startswith(EVENT_STREAM):
            self._is_stream = True
            self.attempt.runner.coalescer.enter()
            self._collected = []
            self._relay(collected)
        else:
            self._is_whole = True
            self._collect(collected[-1])

    def _relay(self, frames: list[Frame]) -> None:
        """Relay events as they arrive, all that are there in one write. The response's head waits for the first data,
        so that a leg that fails before it can still be retried.
        """
        attempt = self.attempt
        runner, context = attempt.runner, attempt.context
        timings = context.timings
        data = b"".join([frame.data for frame in frames]) if len(frames) > 1 else frames[0].data
        for frame in frames:
            if frame.joined:
                context.join(frame.joined)
            context.relayed.fromlist(frame.token_ids)
        if self._is_uncounted:
            context.cached_tokens, self._is_uncounted = cached_in(frames)
        last = frames[-1]
        if data:
            before, at = timings.last_at, runner.now()
            timings.last_at = at
            if before:
                gap_s = at - before
                self._gaps.append(gap_s)
                timings.gap_s_max = max(timings.gap_s_max, gap_s)
            context.deadline_at = min(at + runner.settings.frame_gap_s_max, context.ends_at)
        if self._is_awaited and (data or last.kind is END):
            self._is_awaited = False
            self._first_at = self._written_at = timings.last_at or runner.now()
            self._load.prompt_computed()
            self._begin_stream(self._first_at, data)
        if last.kind is END:
            context.report = last.report
            self._end_stream(data)
        elif data:
            self._data = data
            context.http_request.send(data)
            coalescer, at, leg = runner.coalescer, timings.last_at, self._leg
            if coalescer.must_wait(self._written_at, at, runner.inbox.received) and leg is not None:
                leg.held = True
                coalescer.add(self.resume)
            self._written_at = at

    def _begin_stream(self, at: float, data: bytes) -> None:
        """The first data of this attempt: it begins the response, or resumes it."""
        runner, context, placement = self.attempt.runner, self.attempt.context, self.attempt.placement
        timings = context.timings
        context.answering = True
        if not context.http_request.begun:
            context.status = OK
            timings.first_at = timings.last_at
            context.began(data)
            if placement.decode.record.attached:
                context.why_not_resumable = ATTACHED
            context.http_request.begin(OK, runner.headers(context, placement, EVENT_STREAM))
        elif timings.broke_at != NOT_BROKEN:
            runner.request_log.resumed(at - timings.broke_at)
            context.mark(SpanName.RESUME, timings.broke_at, at)
            timings.broke_at = NOT_BROKEN

    def _end_stream(self, data: bytes) -> None:
        context = self.attempt.context
        self.close(None)
        context.http_request.end(data)
        self._learn(context.report, self._first_at - self.begun_at)
        self.attempt.answered()

    def _collect(self, last: Frame) -> None:
        """Collect the response to its end: until then the request can still be retried."""
        if last.kind is not END:
            return
        runner, context, collected = self.attempt.runner, self.attempt.context, self._collected
        head = collected[0]
        if head.status != OK:
            self.fail(EngineRefused(self.start.worker_id, collected))
            return
        if context.http_request.begun:
            self.fail(LegFailed(NO_STREAM))
            return
        self.close(None)
        context.report = last.report
        context.status = OK
        context.timings.first_at = context.timings.last_at = runner.now()
        body = b"".join([frame.data for frame in collected])
        headers = runner.headers(context, self.attempt.placement, head.content_type)
        context.http_request.answer(OK, headers, body)
        self._learn(context.report, None)
        self.attempt.answered()


def step_s(left_s: float, step_s_max: float, *, may_fail: bool) -> float:
    """How long one step may take when the request has ``left_s`` left. ``may_fail``: another attempt could follow."""
    return min(step_s_max, STEP_SHARE_MAX * left_s if may_fail else left_s)


def cached_in(frames: list[Frame]) -> tuple[int | None, bool]:
    """The cached tokens of the first frame that tells of them, and whether a later one may."""
    for frame in frames:
        if frame.cached_tokens is not None:
            return frame.cached_tokens, False
    return None, not any(frame.token_ids for frame in frames)


def is_complete(data: bytes) -> bool:
    """Whether a stream ends with ``data``: whole events, of which no text holds an unescaped line end."""
    last = data.removesuffix(EVENT_END).rpartition(EVENT_END)[2]
    return data.endswith(EVENT_END) and last.startswith(LAST_EVENTS)


def is_head(frame: Frame) -> bool:
    """Whether it can be a leg's first frame: a head, or a whole response, with a status that HTTP has."""
    return (frame.kind is HEAD or frame.kind is END) and OK <= frame.status <= STATUS_MAX
