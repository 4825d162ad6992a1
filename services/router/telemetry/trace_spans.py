"""The spans of a finished request, from the router's notes and the workers' reports."""

from __future__ import annotations

import random
from collections.abc import Iterator

from opentelemetry.trace import SpanKind

from services.router.relay.request_context import RequestContext
from services.router.telemetry.outcome import SERVER_ERROR, Kept
from services.router.telemetry.trace import LegMark, Trace
from shared.contracts.decisions import TtftParts
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.inference import LegKind, LegReport, RequestFinished
from shared.telemetry.leg_intervals import (
    Interval,
    engine_intervals,
    exchange_intervals,
    first_request_at,
    report_of,
    tokens_of,
)
from shared.telemetry.span_names import Attribute, SpanName
from shared.telemetry.tracing import About, FinishedSpan

SPAN_BITS = 64
IN_ORDER = {
    "tokenize_s": SpanName.TTFT_TOKENIZE,
    "admission_s": SpanName.TTFT_ADMISSION,
    "place_s": SpanName.TTFT_PLACE,
    "failed_s": SpanName.TTFT_FAILED,
    "queue_s": SpanName.TTFT_QUEUE,
    "fetch_s": SpanName.TTFT_FETCH,
    "prefill_s": SpanName.TTFT_PREFILL,
    "handoff_s": SpanName.TTFT_HANDOFF,
    "decode_queue_s": SpanName.TTFT_DECODE_QUEUE,
    "first_token_s": SpanName.TTFT_FIRST_TOKEN,
    "transit_s": SpanName.TTFT_TRANSIT,
}
"""The parts of the time to the first token, in order. Transit comes last, although it occurs between all parts."""
TTFT_ATTRIBUTES = {name: Attribute(f"baton.ttft.{name}") for name in TtftParts.__struct_fields__}
OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion", "/v1/embeddings": "embeddings"}
"""OpenTelemetry's ``gen_ai.operation.name``, for the endpoints that it names."""
PROVIDER = "vllm"


def spans_of(context: RequestContext, finished: RequestFinished, why: Kept, now: float) -> list[FinishedSpan]:
    """All spans that the router exports for the request; ``why``: why its trace is kept."""
    trace = context.trace
    if trace is None:
        return []
    request = FinishedSpan(
        name=SpanName.REQUEST,
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
            trace.span_id,
            SpanName.DECODE,
            first_at,
            last_at,
            {Attribute.OUTPUT_TOKENS: finished.completion_tokens},
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
    """Attributes of the request's own span."""
    about: About = {
        Attribute.REQUEST_ID: finished.request_id,
        Attribute.KEPT: why.value,
        Attribute.HTTP_ROUTE: finished.path,
        Attribute.HTTP_STATUS: finished.status,
        Attribute.PROVIDER: PROVIDER,
        Attribute.MODEL: finished.model,
        Attribute.STREAM: context.facts.stream,
        Attribute.ATTEMPTS: finished.attempts,
        Attribute.RESUMES: finished.resumes,
    }
    optional = {
        Attribute.OPERATION: OPERATIONS.get(finished.path, ""),
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
