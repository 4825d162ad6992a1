"""A finished request's spans, from what was noted of it and from what its workers reported."""

from __future__ import annotations

import random
from collections.abc import Iterator

from opentelemetry.trace import SpanKind

from services.router.placement.request_fields import CHAT, COMPLETIONS
from services.router.relay.request_context import RequestContext
from services.router.telemetry.outcome import SERVER_ERROR, Kept
from services.router.telemetry.trace import LegMark, Trace
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import LegKind, LegReport, RequestFinished
from shared.telemetry.finished_spans import About, Drawn
from shared.telemetry.leg_intervals import (
    Interval,
    engine_intervals,
    exchange_intervals,
    first_ask_at,
    report_of,
    tokens_of,
)
from shared.telemetry.span_names import Attribute, SpanName

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
"""The parts of the time to the first token, as they follow each other; transit is spread over all of them."""
TTFT_ATTRIBUTES = {name: Attribute(f"baton.ttft.{name}") for name in TtftParts.__struct_fields__}
OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion", "/v1/embeddings": "embeddings"}
"""OpenTelemetry's names for what is asked for, where it has some."""
PROVIDER = "vllm"


def spans_of(flight: RequestContext, told: RequestFinished, why: Kept, now: float) -> list[Drawn]:
    """All that the router draws; ``why`` it does."""
    trace = flight.story.spent.trace
    if trace is None:
        return []
    request = Drawn(
        name=SpanName.REQUEST,
        begun_at=flight.story.started_at,
        ended_at=now,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        parent_is_remote=True,
        kind=SpanKind.SERVER,
        about=about_request(flight, told, why),
        error=told.reason if told.status >= SERVER_ERROR else None,
    )
    own = [
        below(trace.span_id, mark.name, mark.begun_at, mark.ended_at)
        for mark in sorted(trace.marks, key=lambda mark: mark.begun_at)
    ]
    return [request, *own, *first_token(flight, told, trace), *legs(flight, trace)]


def first_token(flight: RequestContext, told: RequestFinished, trace: Trace) -> Iterator[Drawn]:
    """The time to it, in its parts, and what came after it."""
    started_at, story = flight.story.started_at, flight.story
    if told.ttft_s < 0.0:
        return
    first_at = started_at + told.ttft_s
    whole = below(trace.span_id, SpanName.FIRST_TOKEN, started_at, first_at)
    yield whole
    at = started_at
    for field, name in IN_ORDER.items() if told.ttft_parts is not None else ():
        part_s = getattr(told.ttft_parts, field)
        if part_s > 0.0:
            yield below(whole.span_id, name, at, at + part_s)
            at += part_s
    if story.last_at > first_at:
        yield below(
            trace.span_id,
            SpanName.DECODE,
            first_at,
            story.last_at,
            {Attribute.OUTPUT_TOKENS: told.completion_tokens},
        )


def legs(flight: RequestContext, trace: Trace) -> Iterator[Drawn]:
    """Each leg; of workers that drew nothing themselves, as the router was told."""
    story = flight.story
    reports = {LegKind.PREFILL: story.prefill_report}
    last = {mark.kind is LegKind.PREFILL: mark for mark in trace.legs}
    for mark in trace.legs:
        yield Drawn(
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
        report = reports.get(mark.kind, story.report)
        if report is not None and not trace.sampled and mark is last[mark.kind is LegKind.PREFILL]:
            yield from as_told(mark, report)


def as_told(mark: LegMark, report: LegReport) -> Iterator[Drawn]:
    """A leg at its worker. Its instants are another clock's: the leg is put into the middle of the time that the
    router waited for it, and what happened in it to where the durations say.
    """
    arrived_at = mark.begun_at + max(0.0, mark.ended_at - mark.begun_at - report.total_s) / 2
    about = report_of(report) | {Attribute.TOLD: True, Attribute.WORKER_ID: mark.worker_id}
    served = below(mark.span_id, SpanName.SERVE_LEG, arrived_at, arrived_at + report.total_s, about)
    yield served
    inside = engine_intervals(report, arrived_at)
    for interval in inside:
        yield shifted(served.span_id, interval, 0.0)
    asked_at = first_ask_at(report.kv) if report.kv is not None else None
    if report.kv is not None and asked_at is not None and inside:
        for interval in exchange_intervals(report.kv, asked_at + report.queue_s):
            yield shifted(served.span_id, interval, inside[0].begun_at - asked_at)


def shifted(parent_id: int, interval: Interval, by_s: float) -> Drawn:
    """What a worker did, on the router's clock."""
    return Drawn(
        name=interval.name,
        begun_at=interval.begun_at + by_s,
        ended_at=interval.ended_at + by_s,
        span_id=new_id(),
        parent_id=parent_id,
        about=interval.about | {Attribute.TOLD: True},
        error=interval.failure or None,
    )


def below(parent_id: int, name: SpanName, begun_at: float, ended_at: float, about: About | None = None) -> Drawn:
    """Something that went well."""
    return Drawn(
        name=name, begun_at=begun_at, ended_at=ended_at, span_id=new_id(), parent_id=parent_id, about=about or {}
    )


def about_request(flight: RequestContext, told: RequestFinished, why: Kept) -> About:
    """What the request's own span says."""
    about: About = {
        Attribute.REQUEST_ID: told.request_id,
        Attribute.KEPT: why.value,
        Attribute.HTTP_ROUTE: told.path,
        Attribute.HTTP_STATUS: told.status,
        Attribute.PROVIDER: PROVIDER,
        Attribute.MODEL: told.model,
        Attribute.STREAM: flight.facts.stream,
        Attribute.ATTEMPTS: told.attempts,
        Attribute.RESUMES: told.resumes,
    }
    said = {
        Attribute.OPERATION: OPERATIONS.get(told.path, ""),
        Attribute.DECISION_ID: told.decision_id,
        Attribute.TENANT: told.tenant,
        Attribute.REASON: told.reason,
        Attribute.ERROR_TYPE: told.reason,
    }
    about |= {key: value for key, value in said.items() if value}
    if told.resumes:
        about[Attribute.RESUMED_TOKENS] = told.resumed_tokens
    if told.ttft_s >= 0.0:
        about[Attribute.TIME_TO_FIRST_CHUNK] = told.ttft_s
    if told.ttft_parts is not None:
        about |= {key: getattr(told.ttft_parts, name) for name, key in TTFT_ATTRIBUTES.items()}
    return about | about_placement(flight, told) | about_report(flight, told)


def about_placement(flight: RequestContext, told: RequestFinished) -> About:
    """Who served it."""
    placed = flight.story.placed
    if placed is None:
        return {}
    about: About = {
        Attribute.MODE: told.mode,
        Attribute.DECODE_WORKER: told.decode_worker,
        Attribute.PREDICTED_CACHED_TOKENS: placed.cached_tokens,
    }
    if told.prefill_worker:
        about[Attribute.PREFILL_WORKER] = told.prefill_worker
        about[Attribute.HANDOFF] = "streamed" if placed.streamed else "offered"
    return about


def about_report(flight: RequestContext, told: RequestFinished) -> About:
    """What the worker that answered said of it."""
    report = flight.story.report
    if report is None:
        return {}
    return {**tokens_of(report), Attribute.CACHE_READ_TOKENS: told.cached_tokens}


def new_id() -> int:
    """Of a span; never 0, which is none."""
    return random.getrandbits(SPAN_BITS) or 1
