"""Serves legs: takes them from the bus, calls the engine's ASGI app, and sends frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from services.worker.engines.port import CURRENT_LEG, Engine, Leg, LegFailed, LegInput, LegResult
from services.worker.kv_exchange.worker_exchange import UnreadOffers
from services.worker.legs.asgi_call import JSON, AsgiCall
from services.worker.legs.body import HANDOFF_PATHS, KvPolicy, moves_kv, own_body, prepare, salted
from services.worker.legs.guard import LEG_S_MAX, Capacity, no_threshold, not_served, refusal, serves
from services.worker.legs.resume import CannotResume, cannot_resume, joined_tokens, resumed_tokens
from shared.bus.frame_sender import FrameSender, LegFrames, LegGone
from shared.bus.port import Envelope
from shared.contracts.engine_paths import FORMS
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import LegId, is_subject_token
from shared.contracts.inference import CancelLeg, LegKind, LegReport, StartLeg
from shared.contracts.kv_exchange import LegOrder
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import Clock
from shared.runtime.service import Service
from shared.telemetry.log import TRACE_ID
from shared.telemetry.span_names import Attribute, SpanName
from shared.telemetry.tracing import (
    Interval,
    engine_intervals,
    exchange_intervals,
    extract,
    inject,
    report_of,
    trace_named,
)
from shared.third_party import CONTAINED

log = logging.getLogger("baton.worker")

OK = 200
BAD_REQUEST = 400
NOT_FOUND = 404
TOKEN_BYTES = 4
"""Size of a packed token id."""
DEATH_NOTICE_S_MAX = 1.0
"""Time that a leg that failed waits for the news that the engine has died."""


class EngineDied(Exception):
    """The leg ended because its engine did."""


def died_of(result: LegResult | None) -> bool:
    """Whether an engine that has died may have died of this leg: it computed a prompt of it."""
    return result is not None and result.prompts_computing > 0


def _input(
    start: StartLeg, order: LegOrder | None, resume: list[int] | None, trace_headers: dict[str, str]
) -> LegInput:
    return LegInput(
        kind=start.kind,
        request_id=start.request_id,
        path=start.path,
        trace_headers=trace_headers,
        prefill_cached_tokens=start.prefill_cached_tokens,
        expected_tokens=start.expected_tokens,
        cache_salt=start.cache_salt,
        media_salt=start.media_salt or start.cache_salt,
        order=order,
        resume=resume,
        resume_joined=joined_tokens(start),
        resume_cached_tokens=max(0, start.cached_tokens) if start.cached_tokens is not None else None,
        answer_id=start.answer_id,
    )


@dataclass(slots=True)
class RunningLeg:
    task: asyncio.Task[bool]
    frames: LegFrames
    start: StartLeg
    headers: Mapping[str, str] | None
    arrived: float = 0.0
    """When the engine's server was called."""
    result: LegResult | None = None
    """None until the engine's server is called."""
    call: AsgiCall | None = None
    """None until the engine's server is called."""


Served = Callable[[StartLeg, str, LegReport, float], None]
"""Gets a leg that the engine served, the id of its trace, its costs, and when it arrived."""


class LegServer:
    """Every leg that this worker serves. Its tasks are children of the service's."""

    def __init__(  # noqa: PLR0913, PLR0917  # wiring
        self,
        service: Service,
        engine: Engine,
        sender: FrameSender,
        capacity: Capacity,
        death: asyncio.Future[str],
        on_changed: Callable[[], None],
        policy: KvPolicy = KvPolicy(),  # noqa: B008  # frozen
        unread: UnreadOffers | None = None,
    ) -> None:
        self.phase = WorkerPhase.STARTING
        self.sequences = 0
        """Sequences of all legs being served."""
        self._service = service
        self._is_traced = not isinstance(service.tracer, NoOpTracer)
        self._engine = engine
        self._sender = sender
        self._capacity = capacity
        self._death = death
        self._on_changed = on_changed
        self._policy = policy
        self._unread = unread
        self._served: Served | None = None
        self._legs: dict[LegId, RunningLeg] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def legs(self) -> int:
        return len(self._legs)

    def start(self, start: StartLeg, envelope: Envelope) -> None:
        """Handler of START_LEG: refuse at once, or serve beside the others."""
        if start.leg_id in self._legs:
            log.warning("leg %s was started twice, the second start is ignored", start.leg_id)
            return
        if not is_subject_token(start.router_id):
            log.warning("leg %s has an unusable router id and is ignored: %.100r", start.leg_id, start.router_id)
            return
        frames = self._sender.leg(start, on_gone=lambda _why: self._abort(start.leg_id))
        if refusal := self._capacity.refusal(start, self.phase, self.sequences):
            frames.fail(refusal)
            self._broken_off(start)
            return
        task = self._service.tasks.create_task(self._run(start, frames, envelope), name=f"leg-{start.leg_id}")
        self._legs[start.leg_id] = RunningLeg(task, frames, start, envelope.headers)
        self.sequences += max(1, start.sequences)
        self._idle.clear()
        task.add_done_callback(lambda task: self._forget(start, task))
        self._on_changed()

    def cancel(self, order: CancelLeg, _envelope: Envelope) -> None:
        leg = self._legs.get(order.leg_id)
        if leg is not None and leg.task.cancel():
            leg.frames.abandon()
        elif self._unread is not None:
            self._unread.unwanted(order.leg_id)

    def fail_all(self, failure: Failure) -> None:
        for leg in self._legs.values():
            suspect = failure.reason is Reason.ENGINE_DEAD and died_of(leg.result)
            leg.frames.fail(msgspec.structs.replace(failure, suspect=suspect))
            leg.task.cancel()

    def on_served(self, listener: Served | None) -> None:
        """Call ``listener`` at the end of each leg from now on; None: no longer."""
        self._served = listener

    def each_running(self, listener: Served) -> None:
        """Call ``listener`` with each leg that the engine serves now, and its costs so far."""
        now = self._service.clock.now()
        for leg in self._legs.values():
            if leg.result is not None:
                listener(leg.start, trace_named(leg.headers), report(leg.result, leg.arrived, now), leg.arrived)

    async def idle(self, s_max: float) -> bool:
        """Wait until no leg is served, for at most ``s_max`` seconds; returns whether none is."""
        try:
            async with asyncio.timeout(s_max):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _abort(self, leg_id: LegId) -> None:
        if leg := self._legs.get(leg_id):
            leg.task.cancel()

    def _forget(self, start: StartLeg, task: asyncio.Task[bool]) -> None:
        """The leg has ended. One that was cancelled before its start could not clean up itself."""
        self._legs.pop(start.leg_id, None)
        self.sequences -= max(1, start.sequences)
        if not self._legs:
            self._idle.set()
        if task.cancelled() or task.exception() is not None or not task.result():
            self._broken_off(start)
        self._on_changed()

    async def _run(self, start: StartLeg, frames: LegFrames, envelope: Envelope) -> bool:
        """Serve one leg to its END or FAILURE; returns whether it reached its END."""
        TRACE_ID.set(trace_named(envelope.headers))
        timer = asyncio.timeout(start.deadline_s)
        try:
            async with timer:
                with self._span(start, envelope) as span:
                    await self._serve(start, frames, span, timer)
            return True
        except LegGone:
            return False
        except (CannotResume, LegFailed) as refused:
            frames.fail(refused.failure)
        except EngineDied as died:
            suspect = died_of(self._legs[start.leg_id].result)
            frames.fail(Failure(reason=Reason.ENGINE_DEAD, message=str(died), suspect=suspect))
        except asyncio.CancelledError:
            frames.fail(self._cancelled(start))
            raise
        except Exception as error:  # The engine's server failed on this leg alone.
            if isinstance(error, TimeoutError) and timer.expired():
                message = f"the leg was not done within its {start.deadline_s:g} s"
                frames.fail(Failure(reason=Reason.DEADLINE, message=message))
                return False
            log.exception("leg %s (%s %s) failed", start.leg_id, start.kind.value, start.path)
            frames.fail(Failure(reason=Reason.INTERNAL, message=f"{type(error).__name__}: {error}"))
        return False

    def _cancelled(self, start: StartLeg) -> Failure:
        """Why the leg was cancelled, for a router that waits for it. Only a failure of the worker itself ends the tasks
        of one that takes legs, and it may have failed at this leg.
        """
        if self.phase is not WorkerPhase.READY:
            return Failure(reason=Reason.CANCELLED, message="the worker cancelled the leg")
        leg = self._legs.get(start.leg_id)
        suspect = leg is None or leg.result is None or not leg.result.completion_tokens
        return Failure(reason=Reason.ENGINE_DEAD, message="the worker failed and ends", suspect=suspect)

    def _broken_off(self, start: StartLeg) -> None:
        if self._unread is not None:
            self._unread.broken_off(start)

    def tell_of_tokens(self) -> None:
        """Keep streams alive that have nothing to show (see ``AsgiCall.tell_of_tokens``)."""
        paused = self._engine.weights is not None and self._engine.weights.paused
        for leg in self._legs.values():
            if leg.call is not None:
                leg.call.tell_of_tokens(paused=paused)

    async def _serve(self, start: StartLeg, frames: LegFrames, span: Span, timer: asyncio.Timeout) -> None:
        """``timer``: the leg's deadline. It holds for a stream's first token: then the router watches the stream, and
        whether the router is there is found by the frames and by the lists of legs in flight.
        """
        arrived = self._service.clock.now()
        if not serves(self._engine.facts, start.path):
            _refuse(frames, NOT_FOUND, not_served(self._engine.facts, start.path))
            return
        if start.path not in FORMS and (refused := await refusal(start.body, start.path)):
            _refuse(frames, BAD_REQUEST, refused)
            return
        if self._engine.exchange is None and start.kind is LegKind.AGGREGATED and start.cache_hit_threshold:
            _refuse(frames, BAD_REQUEST, no_threshold(self._engine.facts))
            return
        body, order, resume = self._orders(start)
        if body is None:
            frames.head(OK, JSON)
            frames.end(LegReport())
            return
        call = AsgiCall(start, body, frames, lambda: self._explain(call.result), partial(_extend, timer))
        running = self._legs[start.leg_id]
        running.call, running.result, running.arrived = call, call.result, arrived
        result = call.result
        CURRENT_LEG.set(Leg(_input(start, order, resume, inject(span) or {}), result))
        await self._call(call)
        is_generation = start.path in HANDOFF_PATHS or result.prompt_tokens > 0
        if call.status == OK and is_generation and not result.finish_reason:
            await self._explain(result)
        check_resumed(start.kind, result, call.status)
        call.finish()
        if order is not None and result.transfer_report is not None and result.transfer_report.refused:
            log_refusal(start, order.cache_hit_threshold, result.transfer_report.hit_share)
        cost = report(result, arrived, self._service.clock.now())
        show_leg(self._service.tracer, span, cost, arrived, self._service.clock)
        if self._served is not None:
            self._served(start, TRACE_ID.get(), cost, arrived)
        frames.end(cost)

    async def _call(self, call: AsgiCall) -> None:
        """Call the engine's server, which of some paths fails itself when its engine fails."""
        try:
            with CONTAINED:
                await call.run(self._engine.app)
        except (LegGone, CannotResume, LegFailed, EngineDied):
            raise
        except Exception:
            await self._explain(call.result)
            raise

    def _orders(self, start: StartLeg) -> tuple[bytes | None, LegOrder | None, list[int] | None]:
        """The engine's body, its order about KV if it takes one, and the tokens to resume from. Raises CannotResume."""
        if start.path in FORMS:
            return self._orders_of_form(start)
        body = salted(start.body, start.cache_salt)
        own = own_body(start.path, body, start.kind, moves_kv=moves_kv(start) or start.resume is not None)
        resume = resumed_tokens(start, is_plain=own.is_plain)
        if self._engine.exchange is None:
            return prepare(start.kind, start.path, body, start.kv_transfer), None, resume
        order = self._policy.order(start, is_plain=own.is_plain, can_refuse=start.path in HANDOFF_PATHS)
        return own.body, order, resume

    def _orders_of_form(self, start: StartLeg) -> tuple[bytes | None, LegOrder | None, list[int] | None]:
        """Forms are neither handed off nor resumed; the engine itself salts what its server makes of one."""
        resume = resumed_tokens(start, is_plain=False)
        has_exchange = self._engine.exchange is not None
        order = self._policy.order(start, is_plain=False, can_refuse=False) if has_exchange else None
        return None if start.kind is LegKind.PREFILL else start.body, order, resume

    def _span(self, start: StartLeg, envelope: Envelope) -> AbstractContextManager[Span]:
        if not self._is_traced and not envelope.headers:
            return nullcontext(INVALID_SPAN)
        about: dict[str, AttributeValue] = {
            Attribute.REQUEST_ID: start.request_id,
            Attribute.LEG_ID: start.leg_id,
            Attribute.LEG_KIND: start.kind.value,
        }
        if start.resume is not None:
            about[Attribute.RESUMED_TOKENS] = len(start.resume) // TOKEN_BYTES
        return self._service.tracer.start_as_current_span(
            SpanName.SERVE_LEG, context=extract(envelope.headers), attributes=about
        )

    async def _explain(self, result: LegResult) -> None:
        """Raises the cause of a failure of the engine's server, if it is known."""
        if result.cannot_resume:
            raise CannotResume(cannot_resume(result.cannot_resume))
        await self._raise_if_died()

    async def _raise_if_died(self) -> None:
        """The news of the engine's death may arrive after the failure that it caused."""
        await asyncio.wait([self._death], timeout=DEATH_NOTICE_S_MAX)
        if self._death.done():
            raise EngineDied(self._death.result())


def _extend(timer: asyncio.Timeout) -> None:
    """Unless it is too late."""
    if not timer.expired():
        timer.reschedule(asyncio.get_running_loop().time() + LEG_S_MAX)


def _refuse(frames: LegFrames, status: int, body: bytes) -> None:
    frames.head(status, JSON)
    frames.data(body)
    frames.end(LegReport())


def log_refusal(start: StartLeg, threshold: float, hit_share: float) -> None:
    """One line for each leg that the engine refuses by its cache hit threshold."""
    is_default = start.cache_hit_threshold is None
    log.info(
        "leg %s of request %s is refused: %.3g of its prompt is cached or can be fetched, below %.3g of %s",
        start.leg_id,
        start.request_id,
        hit_share,
        threshold,
        "this worker's default, WORKER_CACHE_HIT_THRESHOLD" if is_default else "the request",
    )


def check_resumed(kind: LegKind, result: LegResult, status: int) -> None:
    """Raises CannotResume unless the answer continued after the resumed tokens."""
    if status == OK and not result.is_new_to_client and kind is not LegKind.PREFILL:
        raise CannotResume(cannot_resume("the engine's server did not get through the resumed tokens"))


def report(result: LegResult, arrived: float, now: float) -> LegReport:
    """The leg's costs. Resumed tokens are prompt to the engine, and completion to the client."""
    cached = min(result.cached_tokens, result.prompt_tokens)
    return LegReport(
        prompt_tokens=result.prompt_tokens,
        cached_tokens=cached,
        received_tokens=min(result.received_tokens, result.prompt_tokens - cached),
        completion_tokens=result.completion_tokens,
        received_bytes=result.received_bytes,
        queue_s=result.queue_s,
        prefill_s=result.prefill_s,
        first_token_s=max(0.0, result.first_token_at - arrived) if result.first_token_at else 0.0,
        total_s=now - arrived,
        kv_transfer=result.kv_transfer,
        finish_reason=result.finish_reason,
        kv=result.transfer_report,
    )


def show_leg(tracer: Tracer, leg: Span, report: LegReport, arrived_at: float, clock: Clock) -> None:
    """Attributes and children of the leg's span, when it ends: the engine's work, and for each source of KV a lease, a
    wait and a read. Costs nothing without tracing.
    """
    if not leg.is_recording():
        return
    leg.set_attributes(report_of(report))
    now = clock.now()
    intervals = engine_intervals(report, arrived_at)
    if report.kv is not None:
        intervals += exchange_intervals(report.kv, now)
    show_intervals(tracer, leg, intervals, began_ns=clock.wall_ms() * 1_000_000 - round(now * 1e9))


def show_intervals(tracer: Tracer, above: Span, intervals: list[Interval], *, began_ns: int) -> None:
    """The intervals as spans. ``began_ns``: wall-clock time at which the monotonic clock was 0."""
    context = set_span_in_context(above)
    for interval in intervals:
        begun_ns = began_ns + round(interval.begun_at * 1e9)
        span = tracer.start_span(interval.name, context=context, attributes=interval.about, start_time=begun_ns)
        if interval.failure:
            span.set_status(Status(StatusCode.ERROR, interval.failure))
        span.end(began_ns + round(interval.ended_at * 1e9))
