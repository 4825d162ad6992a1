"""One trace per request. While a request runs, the router only notes times. When the request has ended, it makes the
spans if the trace is kept: for a share of all requests, and for those that were slow, failed or resumed.

The workers of a request that is sampled at its start export their own spans below its legs. For a request whose trace
is kept only at its end, the router makes those spans too, from the workers' reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from opentelemetry.trace import SpanKind

from services.router.request.context import RequestContext
from services.router.request.trace import LegMark, Trace, error_of
from services.router.telemetry.outcome import SERVER_ERROR, Kept, kept
from shared.contracts.decisions import TtftParts
from shared.contracts.engine_paths import CHAT, COMPLETIONS, GENERATE, MESSAGES, METHODS, RESPONSES
from shared.contracts.inference import LegKind, LegReport, RequestFinished, StartLeg
from shared.http.origin import host_of
from shared.runtime.clock import Clock, SystemClock
from shared.telemetry.span_names import Attribute, SpanName
from shared.telemetry.tracing import (
    About,
    FinishedSpan,
    Interval,
    SpanSink,
    engine_intervals,
    exchange_intervals,
    first_request_at,
    report_of,
    tokens_of,
)

TRACE_BITS: Final = 128
TOO_MANY: Final = "too_many"
"""Worth keeping, but over the rate limit."""
SLOW_S: Final = 2.0
"""A first token that took longer is slow, for a request without a target."""


class Tracing:
    """Without a ``sink`` the router only passes the client's trace context on."""

    def __init__(self, sink: SpanSink | None = None, clock: Clock | None = None) -> None:
        self._sink = sink
        self._now: Callable[[], float] = (clock or SystemClock()).now
        self._share = TraceShare(sink.sample_ratio if sink is not None else 0.0)
        self.counts = dict.fromkeys([*(one.value for one in Kept), TOO_MANY], 0)
        """Traces by why they were kept, and those over the rate limit."""

    def begin(self, context: RequestContext) -> None:
        """Begin the request's trace: below the client's span if its headers name one."""
        client_trace = context.http_request.head.trace
        if self._sink is None:
            return
        trace = Trace.below(client_trace, new_id()) if client_trace is not None else None
        if trace is None:
            trace = Trace(random.getrandbits(TRACE_BITS) or 1, new_id())
            trace.sampled = self._share.chosen(trace.trace_id, self._now())
        elif trace.sampled:
            trace.sampled = self._share.allowed(self._now())
        context.trace = trace

    def leg(self, context: RequestContext, start: StartLeg) -> LegTimes | None:
        """To note the times of one leg, which begins now; None when tracing is off."""
        return None if context.trace is None else LegTimes(context.trace, start, self._now())

    def ended(self, context: RequestContext, finished: RequestFinished) -> RequestFinished:
        """Keep or drop the trace of a request that has ended. Returns its record, with the trace id of a kept trace."""
        trace, sink = context.trace, self._sink
        if trace is None or sink is None:
            return finished
        why = kept(finished, SLOW_S)
        if not trace.sampled and (why is Kept.SHARE or trace.unwanted):
            return finished
        if not trace.sampled and not self._share.allowed(self._now()):
            self.counts[TOO_MANY] += 1
            return finished
        self.counts[why.value] += 1
        finished = msgspec.structs.replace(finished, trace_id=trace.name())
        sink.draw(trace.trace_id, spans_of(context, finished, why, self._now()))
        return finished


class LegTimes:
    """When a leg began and ended, for its span."""

    __slots__ = ("_begun_at", "_span_id", "_start", "_trace")

    def __init__(self, trace: Trace, start: StartLeg, now: float) -> None:
        self._trace = trace
        self._start = start
        self._span_id = new_id()
        self._begun_at = now

    def headers(self) -> dict[str, str] | None:
        """Headers for the leg's message; see ``Trace.headers``."""
        return self._trace.headers(self._span_id)

    def ended(self, now: float, error: Exception | None) -> None:
        """The leg is over; ``error``: why it failed."""
        start, failure = self._start, None if error is None else error_of(error)
        self._trace.legs.append(
            LegMark(self._span_id, start.worker_id, start.leg_id, start.kind, self._begun_at, now, failure)
        )


FEW_PER_S: Final = 0.2
FEW_AT_ONCE: Final = 10.0
"""Requests traced in addition to the share: all of them at low traffic, a negligible part at high traffic."""
ODD_PER_S_MAX: Final = 100.0
ODD_AT_ONCE_MAX: Final = 200.0
"""Limits on traces kept for unusual requests or because clients ask for them. When every request fails, more traces
would not help an operator, and the router needs its CPU for requests.
"""
CHOOSING_BITS: Final = 64
"""Low bits of the trace id that are compared with the sample ratio, as OpenTelemetry's TraceIdRatioBased does."""


class TokenBucket:
    """Allows ``per_s`` a second on average, and ``most`` at once."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take one, if one is left."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class TraceShare:
    """Which requests are traced: a share chosen at the start, and unusual ones (failed, slow, resumed) at the end.

    Rate limits bound both, so that tracing stays cheap. A single request is always traced; an unusual one is traced
    unless there are too many of them. With ``ratio`` 0 only unusual requests are traced.
    """

    __slots__ = ("_below", "_few", "_mask", "_odd")

    def __init__(self, ratio: float) -> None:
        self._mask = (1 << CHOOSING_BITS) - 1
        self._below = round(ratio * (1 << CHOOSING_BITS))
        self._few = TokenBucket(FEW_PER_S, FEW_AT_ONCE) if ratio > 0.0 else TokenBucket(0.0, 0.0)
        self._odd = TokenBucket(ODD_PER_S_MAX, ODD_AT_ONCE_MAX)

    def chosen(self, trace_id: int, now: float) -> bool:
        """Whether a request without a client's trace context is traced from its start."""
        return (trace_id & self._mask) < self._below or self._few.take(now)

    def allowed(self, now: float) -> bool:
        """Whether one more unusual request, or one that its client wants traced, may be traced."""
        return self._odd.take(now)


SPAN_BITS: Final = 64
IN_ORDER: Final = {
    "tokenize_s": SpanName.TTFT_TOKENIZE,
    "admission_s": SpanName.TTFT_ADMISSION,
    "place_s": SpanName.TTFT_PLACE,
    "failed_s": SpanName.TTFT_FAILED,
    "queue_s": SpanName.TTFT_QUEUE,
    "fetch_s": SpanName.TTFT_FETCH,
    "prefill_s": SpanName.TTFT_PREFILL,
    "handoff_s": SpanName.TTFT_HANDOFF,
    "decode_queue_s": SpanName.TTFT_DECODE_QUEUE,
    "decode_prefill_s": SpanName.TTFT_DECODE_PREFILL,
    "front_end_and_bus_s": SpanName.TTFT_FRONT_END_AND_BUS,
}
"""The parts of the time to the first token, in order; but front ends and bus, whose time is between all, come last."""
TTFT_ATTRIBUTES: Final = {name: Attribute(f"baton.ttft.{name}") for name in TtftParts.__struct_fields__}
OPERATIONS: Final = {
    CHAT: "chat",
    MESSAGES: "chat",
    RESPONSES: "chat",
    COMPLETIONS: "text_completion",
    GENERATE: "text_completion",
    "/v1/embeddings": "embeddings",
}
"""OpenTelemetry's ``gen_ai.operation.name``, for the endpoints that it names."""
PROVIDER: Final = "vllm"


def method_of(path: str) -> str:
    """The HTTP method with which this path is asked."""
    return METHODS.get(path, SpanName.REQUEST)


def spans_of(context: RequestContext, finished: RequestFinished, why: Kept, now: float) -> list[FinishedSpan]:
    """All spans that the router exports for the request; ``why``: why its trace is kept."""
    trace = context.trace
    if trace is None:
        return []
    request = FinishedSpan(
        name=f"{method_of(finished.path)} {finished.path}",
        begun_at=context.timings.started_at,
        ended_at=now,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        parent_is_remote=True,
        kind=SpanKind.SERVER,
        about=about_request(context, finished, why),
        error=finished.reason if finished.status >= SERVER_ERROR else None,
    )
    own = [
        below(trace.span_id, mark.name, mark.begun_at, mark.ended_at)
        for mark in sorted(trace.marks, key=lambda mark: mark.begun_at)
    ]
    return [request, *own, *first_token(context, finished, trace), *legs(context, trace)]


def first_token(context: RequestContext, finished: RequestFinished, trace: Trace) -> Iterator[FinishedSpan]:
    """The time to the first token with its parts, and the time from then to the last token."""
    started_at, last_at = context.timings.started_at, context.timings.last_at
    if finished.ttft_s < 0.0:
        return
    first_at = started_at + finished.ttft_s
    whole = below(trace.span_id, SpanName.FIRST_TOKEN, started_at, first_at)
    yield whole
    at = started_at
    for field, name in IN_ORDER.items() if finished.ttft_parts is not None else ():
        part_s = getattr(finished.ttft_parts, field)
        if part_s > 0.0:
            yield below(whole.span_id, name, at, at + part_s)
            at += part_s
    if last_at > first_at:
        yield below(
            trace.span_id, SpanName.DECODE, first_at, last_at, {Attribute.OUTPUT_TOKENS: finished.completion_tokens}
        )


def legs(context: RequestContext, trace: Trace) -> Iterator[FinishedSpan]:
    """A span for each leg, and, where the worker exports no spans, spans made from the worker's report."""
    reports = {LegKind.PREFILL: context.prefill_report}
    last = {mark.kind is LegKind.PREFILL: mark for mark in trace.legs}
    for mark in trace.legs:
        yield FinishedSpan(
            name=SpanName.PREFILL_LEG if mark.kind is LegKind.PREFILL else SpanName.DECODE_LEG,
            begun_at=mark.begun_at,
            ended_at=mark.ended_at,
            span_id=mark.span_id,
            parent_id=trace.span_id,
            kind=SpanKind.CLIENT,
            about={
                Attribute.LEG_ID: mark.leg_id,
                Attribute.LEG_KIND: mark.kind.value,
                Attribute.WORKER_ID: mark.worker_id,
            },
            error=mark.error,
        )
        report = reports.get(mark.kind, context.report)
        if report is not None and not trace.sampled and mark is last[mark.kind is LegKind.PREFILL]:
            yield from worker_spans(mark, report)


def worker_spans(mark: LegMark, report: LegReport) -> Iterator[FinishedSpan]:
    """The leg as its worker reported it. The worker's clock is not the router's: its total time is put in the middle of
    the time that the router waited, and the intervals within it follow from their durations.
    """
    arrived_at = mark.begun_at + max(0.0, mark.ended_at - mark.begun_at - report.total_s) / 2
    about = report_of(report) | {Attribute.FROM_REPORT: True, Attribute.WORKER_ID: mark.worker_id}
    served = below(mark.span_id, SpanName.SERVE_LEG, arrived_at, arrived_at + report.total_s, about)
    yield served
    inside = engine_intervals(report, arrived_at)
    for interval in inside:
        yield shifted(served.span_id, interval, 0.0)
    requested_at = first_request_at(report.kv) if report.kv is not None else None
    if report.kv is not None and requested_at is not None and inside:
        for interval in exchange_intervals(report.kv, requested_at + report.queue_s):
            yield shifted(served.span_id, interval, inside[0].begun_at - requested_at)


def shifted(parent_id: int, interval: Interval, by_s: float) -> FinishedSpan:
    """An interval on a worker's clock, moved to the router's."""
    return FinishedSpan(
        name=interval.name,
        begun_at=interval.begun_at + by_s,
        ended_at=interval.ended_at + by_s,
        span_id=new_id(),
        parent_id=parent_id,
        about=interval.about | {Attribute.FROM_REPORT: True},
        error=interval.failure or None,
    )


def below(parent_id: int, name: SpanName, begun_at: float, ended_at: float, about: About | None = None) -> FinishedSpan:
    """A span without an error."""
    return FinishedSpan(
        name=name, begun_at=begun_at, ended_at=ended_at, span_id=new_id(), parent_id=parent_id, about=about or {}
    )


def about_request(context: RequestContext, finished: RequestFinished, why: Kept) -> About:
    about: About = {
        Attribute.REQUEST_ID: finished.request_id,
        Attribute.KEPT: why.value,
        Attribute.HTTP_METHOD: method_of(finished.path),
        Attribute.HTTP_ROUTE: finished.path,
        Attribute.URL_PATH: finished.path,
        Attribute.HTTP_STATUS: finished.status,
        Attribute.PROVIDER: PROVIDER,
        Attribute.MODEL: context.facts.alias or finished.model,
        Attribute.STREAM: context.facts.stream,
        Attribute.ATTEMPTS: finished.attempts,
        Attribute.RESUMES: finished.resumes,
    }
    optional = {
        Attribute.OPERATION: OPERATIONS.get(finished.path, ""),
        Attribute.SERVER_ADDRESS: host_of(context.http_request.head.host.decode("latin-1")),
        Attribute.RESPONSE_MODEL: finished.model if finished.decode_worker else "",
        Attribute.DECISION_ID: finished.decision_id,
        Attribute.TENANT: finished.tenant,
        Attribute.REASON: finished.reason,
        Attribute.ERROR_TYPE: finished.reason,
    }
    about |= {key: value for key, value in optional.items() if value}
    if finished.resumes:
        about[Attribute.RESUMED_TOKENS] = finished.resumed_tokens
    if finished.ttft_s >= 0.0:
        about[Attribute.TIME_TO_FIRST_CHUNK] = finished.ttft_s
    if finished.ttft_parts is not None:
        about |= {key: getattr(finished.ttft_parts, name) for name, key in TTFT_ATTRIBUTES.items()}
    return about | about_placement(context, finished) | about_report(context, finished)


def about_placement(context: RequestContext, finished: RequestFinished) -> About:
    """Attributes of the workers that served the request."""
    placement = context.placement
    if placement is None:
        return {}
    about: About = {
        Attribute.MODE: finished.mode,
        Attribute.DECODE_WORKER: finished.decode_worker,
        Attribute.PREDICTED_CACHED_TOKENS: placement.cached_tokens,
    }
    if finished.prefill_worker:
        about[Attribute.PREFILL_WORKER] = finished.prefill_worker
        about[Attribute.HANDOFF] = "streamed" if placement.streamed else "offered"
    return about


def about_report(context: RequestContext, finished: RequestFinished) -> About:
    """Attributes from the report of the leg that answered."""
    report = context.report
    if report is None:
        return {}
    return {**tokens_of(report), Attribute.CACHE_READ_TOKENS: finished.cached_tokens}


def new_id() -> int:
    """A span id; never 0, which means none."""
    return random.getrandbits(SPAN_BITS) or 1
