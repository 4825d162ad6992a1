"""Run the legs of one placed request: the prefill leg to its report, the answering leg to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.router.http.errors import EVENT_STREAM
from services.router.http.response_headers import ServedBy
from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode
from services.router.relay.attempt import NOT_BROKEN
from services.router.relay.guarded_leg import Frames, GuardedLeg
from services.router.relay.leg_account import Account
from services.router.relay.migration import hop_s
from services.router.relay.parts import Parts
from services.router.relay.request_context import RequestContext
from services.router.relay.start_leg import Starts
from services.router.relay.write_coalescer import WriteCoalescer
from shared.bus.leg_inbox import Leg, LegFailed
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import Frame, FrameKind, LegKind, LegReport, StartLeg
from shared.telemetry.span_names import SpanName

HEAD, END = FrameKind.HEAD, FrameKind.END
OK = 200
REPORT_S_MAX = 1.0
"""For a prefill leg to end when the answer that it ran beside is complete; then only its numbers are missing."""
WORDS_MAX = 500
"""Bytes of an engine's refusal that are repeated inside of a stream."""
DONE = b"data: [DONE]\n\n"
"""Of a stream that ends so nothing is missing, whatever happens to its leg after that."""
OTHER_LEG_OVER = Failure(reason=Reason.CANCELLED, message="the leg beside it is over")


class EngineRefused(Exception):
    """The engine answered a leg with an error of its own; the client gets it as it is."""

    def __init__(self, worker_id: WorkerId, frames: list[Frame]) -> None:
        head = frames[0]
        super().__init__(f"status {head.status}")
        self.worker_id = worker_id
        self.status = head.status
        self.content_type = head.content_type
        self.body = b"".join([frame.data for frame in frames])

    def as_text(self) -> str:
        """For the client of a stream, who cannot be answered with a status any more."""
        return f"The engine refused to go on ({self.status}): {self.body[:WORDS_MAX].decode(errors='replace')}"


NOT_ANSWERED = (LegFailed, EngineRefused, BusDown, MessageTooLarge)


class LegRunner:
    """Starts legs and reads them to their end. Every wait is under the flight's deadline."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._now: Callable[[], float] = parts.clock.now
        self._parts = parts
        self._inbox = parts.inbox
        self._measures = parts.measures
        self._reservations = parts.reservations
        self._tracing = parts.tracing
        self._starts = Starts(parts.router_id, parts.clock.now, guards_handoffs=parts.failures.guards_handoffs)
        self._coalescer = WriteCoalescer()
        self._resumed = parts.ledger.resumed
        self._gaps = parts.ledger.timings.gaps
        self.headers = ServedBy().headers
        """What the client is told beside the answer."""

    async def run(self, flight: RequestContext, placed: Placement) -> None:
        """All legs of this placement. Raises NOT_ANSWERED."""
        if placed.prefill is None:
            self._allow_answer(flight)
            start = self._starts.make(flight, placed, LegKind.AGGREGATED)
            await self._answer(flight, placed, start)
        elif placed.streamed:
            await self._side_by_side(flight, placed)
        else:
            self._allow_prefill(flight)
            report = await self._prefill(flight, placed)
            self._allow_answer(flight)
            await self._answer(flight, placed, self._starts.make(flight, placed, LegKind.DECODE, report))

    async def _side_by_side(self, flight: RequestContext, placed: Placement) -> None:
        """Both legs at once: decode reads the KV as it is computed. A prefill leg that fails takes the decode leg with
        it, unless that has begun to answer: then it matters to nobody.
        """
        self._allow_prefill(flight)
        prefilling = asyncio.create_task(self._prefill_beside(flight, placed), name="prefill-leg")
        try:
            await self._answer(flight, placed, self._starts.make(flight, placed, LegKind.DECODE))
            flight.story.answered_at = self._now()
            if not prefilling.done():
                await asyncio.wait([prefilling], timeout=REPORT_S_MAX)
        except NOT_ANSWERED:
            flight.stop(OTHER_LEG_OVER)
            cause = await prefilling
            if cause is not None and not flight.attempts.answering:
                raise cause from None
            raise
        finally:
            flight.stop(OTHER_LEG_OVER)
            await prefilling

    async def _prefill_beside(self, flight: RequestContext, placed: Placement) -> Exception | None:
        """Answers why there can be no answer because of it."""
        try:
            await self._prefill(flight, placed)
        except NOT_ANSWERED as failure:
            beside = any(leg.unread for leg in flight.legs)
            if flight.attempts.answering or flight.stopped is OTHER_LEG_OVER or beside:
                return None
            flight.stop(OTHER_LEG_OVER)
            return failure
        if not flight.attempts.answering:
            self._allow_answer(flight)
        return None

    def _allow_prefill(self, flight: RequestContext) -> None:
        self._allow(flight, self._settings.prefill_s_max)

    def _allow_answer(self, flight: RequestContext) -> None:
        """The answer's first frame is the next to come."""
        if flight.facts.stream:
            self._allow(flight, self._settings.first_frame_s_max)
        else:  # A whole answer's head comes with its body, when all tokens are there.
            flight.allow(self._now(), self._settings.request_s_max)

    def _allow(self, flight: RequestContext, hop_s_max: float) -> None:
        now, may_fail = self._now(), flight.attempts.left(self._settings.attempts_max, begun=flight.exchange.begun)
        flight.allow(now, hop_s(flight.ends_at - now, hop_s_max, may_fail=may_fail))

    async def _open(self, flight: RequestContext, start: StartLeg, headers: dict[str, str] | None) -> Leg:
        if flight.stopped is not None:
            raise LegFailed(flight.stopped)
        leg = await self._inbox.start(start, headers)
        if flight.story.placed is not None:
            self._reservations.leg_started(start, flight.story.placed.context_tokens)
        flight.started(leg)
        return leg

    async def _prefill(self, flight: RequestContext, placed: Placement) -> LegReport:
        start = self._starts.make(flight, placed, LegKind.PREFILL)
        begun = self._now()
        with (
            Account(self._parts, start, placed.context_tokens),
            self._tracing.leg(flight, start) as headers,
        ):
            leg = await self._open(flight, start, headers)
            frames = await leg.frames()
            while frames[-1].kind is not END:
                frames += await leg.frames()
        if status_of(frames[0]) != OK:
            raise EngineRefused(start.worker_id, frames)
        report = frames[-1].report
        if report is None:
            raise LegFailed(Failure(reason=Reason.BAD_MESSAGE, message="The prefill leg ended without a report."))
        flight.story.prefill_s = self._now() - begun
        flight.story.prefill_report = report
        self._measures.leg_ended(start, report, flight.story.prefill_s)
        return report

    async def _answer(self, flight: RequestContext, placed: Placement, start: StartLeg) -> None:
        begun, story, first_at = self._now(), flight.story, None
        with (
            Account(self._parts, start, placed.context_tokens) as account,
            self._tracing.leg(flight, start) as headers,
        ):
            leg: Frames = await self._open(flight, start, headers)
            guarded = placed.mode is Mode.DECODE_FIRST or self._starts.guards(flight, placed)
            leg = GuardedLeg(leg) if guarded else leg
            frames = await leg.frames()
            while guarded and frames[-1].kind is not END and not any(frame.token_ids for frame in frames):
                frames += await leg.frames()  # Until the first token, or the refusal.
            streams = status_of(frames[0]) == OK and frames[0].content_type.startswith(EVENT_STREAM)
            if streams:
                with self._coalescer:
                    first_at = await self._stream(flight, placed, leg, frames, account)
            else:
                await self._whole(flight, placed, leg, frames)
        self._measures.leg_ended(start, story.report, first_at - begun if first_at is not None else None)

    async def _stream(
        self, flight: RequestContext, placed: Placement, leg: Frames, frames: list[Frame], account: Account
    ) -> float:
        """Relay events as they come, all that have arrived in one write. The head waits for the first data, so that
        a leg that fails before it can still be placed again. Answers when that was.
        """
        exchange, story, now, gap_s = flight.exchange, flight.story, self._now, self._settings.frame_gap_s_max
        had, awaited = flight.attempts.had, True
        remember = had.remember
        spent, note_gap = story.spent, self._gaps.of[placed.mode.value].noted.append
        written_at = first_at = 0.0
        at = story.last_at
        while True:
            data = b"".join([frame.data for frame in frames]) if len(frames) > 1 else frames[0].data
            for frame in frames:
                if frame.joined:
                    had.join(frame.joined)
                remember(frame.token_ids)
            last = frames[-1]
            if data:
                before, at = at, now()
                story.last_at = at
                if before:
                    note_gap(gap := at - before)
                    spent.gap_s_max = max(spent.gap_s_max, gap)
                flight.deadline_at = min(at + gap_s, flight.ends_at)
            if awaited and (data or last.kind is END):
                awaited, first_at = False, at or now()
                account.prompt_computed()
                self._begin(flight, placed, first_at, data)
            if last.kind is END:
                break
            if data:
                await exchange.send(data)
                if at - written_at < self._coalescer.period_s:
                    await self._coalescer.beat()
                written_at = at
            try:
                frames = await leg.frames()
            except LegFailed:
                if not data.endswith(DONE):
                    raise
                data = b""
                break
        story.report = last.report
        exchange.end(data)
        return first_at

    def _begin(self, flight: RequestContext, placed: Placement, at: float, data: bytes) -> None:
        """The first data of this attempt's stream: of the answer, or of what was missing of it."""
        story, attempts = flight.story, flight.attempts
        attempts.answering = True
        if not flight.exchange.begun:
            story.status = OK
            story.first_at = story.last_at
            attempts.had.begin(data)
            flight.exchange.begin(OK, self.headers(flight, placed, EVENT_STREAM))
        elif attempts.broke_at != NOT_BROKEN:
            self._resumed(at - attempts.broke_at)
            flight.mark(SpanName.RESUME, attempts.broke_at, at)
            attempts.broke_at = NOT_BROKEN

    async def _whole(self, flight: RequestContext, placed: Placement, leg: Frames, frames: list[Frame]) -> None:
        """Collect the answer until its end: until then the request can still be placed again."""
        size = sum([len(frame.data) for frame in frames])
        while frames[-1].kind is not END:
            more = await leg.frames()
            size += sum([len(frame.data) for frame in more])
            if size > self._settings.answer_bytes_max:
                raise LegFailed(Failure(reason=Reason.INTERNAL, message="The answer is larger than the router holds."))
            frames += more
        if frames[0].status != OK:
            raise EngineRefused(leg.worker_id, frames)
        if flight.exchange.begun:
            raise LegFailed(Failure(reason=Reason.BAD_MESSAGE, message="The stream went on as something else."))
        story = flight.story
        story.report = frames[-1].report
        story.status = OK
        story.first_at = story.last_at = self._now()
        body = b"".join([frame.data for frame in frames])
        flight.exchange.answer(OK, self.headers(flight, placed, frames[0].content_type), body)


def status_of(head: Frame) -> int:
    """The HTTP status in a leg's first frame. Raises LegFailed when that is no head."""
    if head.kind is not HEAD or not 200 <= head.status <= 599:
        raise LegFailed(Failure(reason=Reason.BAD_MESSAGE, message="The leg's answer does not begin with a head."))
    return head.status
