"""Runs the legs of a placed request: the prefill leg to its report, the answering leg to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.router.http.errors import EVENT_STREAM
from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode
from services.router.relay.migration import ATTACHED
from services.router.relay.request_context import RequestContext, ResponseHeaders
from services.router.relay.start_leg import Frames, GuardedLeg, LegLoad, LegLoads, LegStarter
from services.router.settings import Settings
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.telemetry.request_log import RequestLog
from services.router.telemetry.tracing import Tracing
from services.router.telemetry.ttft import NOT_BROKEN
from shared.bus.leg_inbox import Leg, LegFailed, LegInbox
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import Frame, FrameKind, LegKind, LegReport, StartLeg
from shared.telemetry.span_names import SpanName

HEAD, END = FrameKind.HEAD, FrameKind.END
OK = 200
REPORT_S_MAX = 1.0
"""How long a complete response waits for its prefill leg to end: only that leg's report is missing then."""
REFUSAL_BYTES_MAX = 500
"""Of an engine's error body that are quoted in a stream's last event."""
STEP_SHARE_MAX = 0.5
"""Of a request's remaining time, for one step that may be retried: the rest is for the retry."""
LAST_EVENTS = (b"data: [DONE]", b"event: message_stop\n", b"event: response.completed\n")
"""A stream that ends with one of them is complete, whatever happens to its leg afterwards."""
EVENT_END = b"\n\n"
OTHER_LEG_OVER = Failure(reason=Reason.CANCELLED, message="the leg beside it is over")


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


NOT_ANSWERED = (LegFailed, EngineRefused, BusDown, MessageTooLarge)


class LegRunner:
    """Starts legs and reads them to their end. The request's ``deadline_at`` bounds every wait."""

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
    ) -> None:
        self._settings = settings
        self._now = now
        self._inbox = inbox
        self._starter = starter
        self._loads = loads
        self._speeds = speeds
        self._tracing = tracing
        self._request_log = request_log
        self._gaps = request_log.metrics.gaps
        self._headers = response_headers.of
        self._coalescer = WriteCoalescer()

    async def run(self, context: RequestContext, placement: Placement) -> None:
        """Run all legs of this placement. Raises NOT_ANSWERED."""
        if placement.prefill is None:
            self._allow_answer(context)
            start = self._starter.make(context, placement, LegKind.AGGREGATED)
            await self._answer(context, placement, start)
        elif placement.streamed:
            await self._side_by_side(context, placement)
        else:
            self._allow_prefill(context)
            report = await self._prefill(context, placement, self._starter.make(context, placement, LegKind.PREFILL))
            self._allow_answer(context)
            await self._answer(context, placement, self._starter.make(context, placement, LegKind.DECODE, report))

    async def _side_by_side(self, context: RequestContext, placement: Placement) -> None:
        """Run both legs at once: the decode worker reads the KV as the prefill worker computes it. A failed prefill leg
        stops the decode leg, unless that has begun to answer: then it has all the KV it needs.
        """
        self._allow_prefill(context)
        prefill = self._starter.make(context, placement, LegKind.PREFILL)
        decode = self._starter.make(context, placement, LegKind.DECODE, beside=prefill.leg_id)
        prefilling = asyncio.create_task(self._prefill_beside(context, placement, prefill), name="prefill-leg")
        try:
            await self._answer(context, placement, decode)
            context.timings.answered_at = self._now()
            if not prefilling.done():
                await asyncio.wait([prefilling], timeout=REPORT_S_MAX)
        except NOT_ANSWERED:
            context.stop(OTHER_LEG_OVER)
            cause = await prefilling
            if cause is not None and not context.answering:
                raise cause from None
            raise
        finally:
            context.stop(OTHER_LEG_OVER)
            await prefilling

    async def _prefill_beside(self, context: RequestContext, placement: Placement, start: StartLeg) -> Exception | None:
        """Run the prefill leg; return its failure if that is why the request cannot be answered."""
        try:
            await self._prefill(context, placement, start)
        except NOT_ANSWERED as failure:
            beside = any(leg.unread for leg in context.legs)
            if context.answering or context.stopped is OTHER_LEG_OVER or beside:
                return None
            context.stop(OTHER_LEG_OVER)
            return failure
        if not context.answering:
            self._allow_answer(context)
        return None

    def _allow_prefill(self, context: RequestContext) -> None:
        self._allow(context, self._settings.prefill_s_max)

    def _allow_answer(self, context: RequestContext) -> None:
        """The next step ends with the response's first frame."""
        if context.facts.stream:
            self._allow(context, self._settings.first_frame_s_max)
        else:  # An engine sends the head of a response that is no stream with its body, when all tokens are there.
            context.allow(self._now(), self._settings.request_s_max)

    def _allow(self, context: RequestContext, step_s_max: float) -> None:
        now, may_fail = self._now(), context.may_retry(self._settings.attempts_max)
        context.allow(now, step_s(context.ends_at - now, step_s_max, may_fail=may_fail))

    async def _open(
        self, context: RequestContext, start: StartLeg, load: LegLoad, headers: dict[str, str] | None
    ) -> Leg:
        if context.stopped is not None:
            raise LegFailed(context.stopped)
        leg = await self._inbox.start(start, headers)
        load.sent()
        context.started(leg)
        return leg

    async def _prefill(self, context: RequestContext, placement: Placement, start: StartLeg) -> LegReport:
        begun = self._now()
        load, times = LegLoad(self._loads, start, placement.context_tokens), self._tracing.leg(context, start)
        with load, times as headers:
            leg = await self._open(context, start, load, headers)
            frames = await leg.frames()
            while frames[-1].kind is not END:
                frames += await leg.frames()
        if status_of(frames[0]) != OK:
            raise EngineRefused(start.worker_id, frames)
        report = frames[-1].report
        if report is None:
            raise LegFailed(Failure(reason=Reason.BAD_MESSAGE, message="The prefill leg ended without a report."))
        context.timings.prefill_s = prefill_s = self._now() - begun
        context.prefill_report = report
        self._speeds.leg_ended(start.worker_id, start.epoch, report, prefill_s)
        return report

    async def _answer(self, context: RequestContext, placement: Placement, start: StartLeg) -> None:
        begun, first_at = self._now(), None
        load, times = LegLoad(self._loads, start, placement.context_tokens), self._tracing.leg(context, start)
        with load, times as headers:
            leg: Frames = await self._open(context, start, load, headers)
            guarded = placement.mode is Mode.DECODE_FIRST or self._starter.guards(context, placement)
            leg = GuardedLeg(leg) if guarded else leg
            frames = await leg.frames()
            while guarded and frames[-1].kind is not END and not any(frame.token_ids for frame in frames):
                frames += await leg.frames()  # Until the first token or the refusal: both come after the head.
            if status_of(frames[0]) == OK and frames[0].content_type.startswith(EVENT_STREAM):
                with self._coalescer:
                    first_at = await self._stream(context, placement, leg, frames, load)
            else:
                await self._whole(context, placement, leg, frames)
        first_token_s = first_at - begun if first_at is not None else None
        self._speeds.leg_ended(start.worker_id, start.epoch, context.report, first_token_s)

    async def _stream(  # noqa: C901  # a call less for every relayed token
        self, context: RequestContext, placement: Placement, leg: Frames, frames: list[Frame], load: LegLoad
    ) -> float:
        """Relay events as they arrive, all that are there in one write. The response's head waits for the first data,
        so that a leg that fails before it can still be retried. Returns when the first data came.
        """
        http_request, timings = context.http_request, context.timings
        now, gap_s_max = self._now, self._settings.frame_gap_s_max
        # Bound once per stream: this loop runs for every relayed token.
        remember = context.relayed.fromlist
        note_gap = self._gaps.of[placement.mode.value].noted.append
        written_at = first_at = 0.0
        at, awaited, uncounted = timings.last_at, True, context.cached_tokens is None
        while True:
            data = b"".join([frame.data for frame in frames]) if len(frames) > 1 else frames[0].data
            for frame in frames:
                if frame.joined:
                    context.join(frame.joined)
                remember(frame.token_ids)
            if uncounted:
                context.cached_tokens, uncounted = cached_in(frames)
            last = frames[-1]
            if data:
                before, at = at, now()
                timings.last_at = at
                if before:
                    note_gap(gap_s := at - before)
                    timings.gap_s_max = max(timings.gap_s_max, gap_s)
                context.deadline_at = min(at + gap_s_max, context.ends_at)
            if awaited and (data or last.kind is END):
                awaited, first_at = False, at or now()
                load.prompt_computed()
                self._begin(context, placement, first_at, data)
            if last.kind is END:
                break
            if data:
                await http_request.send(data)
                if at - written_at < self._coalescer.period_s:
                    await self._coalescer.wait()
                written_at = at
            try:
                frames = await leg.frames()
            except LegFailed:
                if not is_complete(data):
                    raise
                data = b""
                break
        context.report = last.report
        http_request.end(data)
        return first_at

    def _begin(self, context: RequestContext, placement: Placement, at: float, data: bytes) -> None:
        """The first data of this attempt: it begins the response, or resumes it."""
        timings = context.timings
        context.answering = True
        if not context.http_request.begun:
            context.status = OK
            timings.first_at = timings.last_at
            context.began(data)
            if placement.decode.record.attached:
                context.why_not_resumable = ATTACHED
            context.http_request.begin(OK, self._headers(context, placement, EVENT_STREAM))
        elif timings.broke_at != NOT_BROKEN:
            self._request_log.resumed(at - timings.broke_at)
            context.mark(SpanName.RESUME, timings.broke_at, at)
            timings.broke_at = NOT_BROKEN

    async def _whole(self, context: RequestContext, placement: Placement, leg: Frames, frames: list[Frame]) -> None:
        """Collect the response to its end: until then the request can still be retried."""
        size = sum([len(frame.data) for frame in frames])
        while frames[-1].kind is not END:
            more = await leg.frames()
            size += sum([len(frame.data) for frame in more])
            if size > self._settings.answer_bytes_max:
                raise LegFailed(Failure(reason=Reason.INTERNAL, message="The answer is larger than the router holds."))
            frames += more
        if frames[0].status != OK:
            raise EngineRefused(leg.worker_id, frames)
        if context.http_request.begun:
            message = "The worker that took over the stream did not answer with a stream."
            raise LegFailed(Failure(reason=Reason.BAD_MESSAGE, message=message))
        context.report = frames[-1].report
        context.status = OK
        context.timings.first_at = context.timings.last_at = self._now()
        body = b"".join([frame.data for frame in frames])
        context.http_request.answer(OK, self._headers(context, placement, frames[0].content_type), body)


def step_s(left_s: float, step_s_max: float, *, may_fail: bool) -> float:
    """How long one step may take when the request has ``left_s`` left. ``may_fail``: another attempt could follow."""
    return min(step_s_max, STEP_SHARE_MAX * left_s if may_fail else left_s)


def cached_in(frames: list[Frame]) -> tuple[int | None, bool]:
    """The cached tokens of the first frame that tells of them, and whether a later one may."""
    cached = next((frame.cached_tokens for frame in frames if frame.cached_tokens is not None), None)
    return cached, cached is None and not any(frame.token_ids for frame in frames)


def is_complete(data: bytes) -> bool:
    """Whether a stream ends with ``data``: whole events, of which no text holds an unescaped line end."""
    last = data.removesuffix(EVENT_END).rpartition(EVENT_END)[2]
    return data.endswith(EVENT_END) and last.startswith(LAST_EVENTS)


def status_of(head: Frame) -> int:
    """The HTTP status in a leg's first frame. Raises LegFailed for a frame that is no head."""
    if head.kind is not HEAD or not 200 <= head.status <= 599:
        raise LegFailed(Failure(reason=Reason.BAD_MESSAGE, message="The leg's answer does not begin with a head."))
    return head.status


PERIOD_S_PER_STREAM = 50e-6
PERIOD_S_MAX = 0.01


class WriteCoalescer:
    """Batches the writes of many fast streams into one turn of the event loop: ``with coalescer:`` around each stream;
    ``wait`` ends at the moment when all waiting streams write.

    A socket write costs more than everything else the router does for an event; most of that is waking the client. With
    few streams the wait is too short to matter. With hundreds at full speed it saves most of the CPU. A stream with
    10 ms or more between its tokens never waits.
    """

    def __init__(self) -> None:
        self.period_s = 0.0
        """A stream that has written less than this ago waits before its next write."""
        self._streams = 0
        self._next: asyncio.Event | None = None

    def __enter__(self) -> None:
        self._streams += 1
        self.period_s = min(PERIOD_S_MAX, self._streams * PERIOD_S_PER_STREAM)

    def __exit__(self, *_exc: object) -> None:
        self._streams -= 1
        self.period_s = min(PERIOD_S_MAX, self._streams * PERIOD_S_PER_STREAM)

    async def wait(self) -> None:
        """Wait for the next common moment, at most ``PERIOD_S_MAX``."""
        if self._next is None:
            self._next = asyncio.Event()
            asyncio.get_running_loop().call_later(self.period_s, self._wake_all)
        await self._next.wait()

    def _wake_all(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set()
