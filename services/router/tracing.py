"""One trace per request: a span for the request, and under it one for each placement and each leg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry.trace import NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from services.router.flight import Flight, first_token
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import LegKind, StartLeg
from shared.telemetry.propagation import extract, inject
from shared.telemetry.span_names import Attribute, SpanName

SERVER_ERROR = 500
TTFT_ATTRIBUTES = {name: Attribute(f"baton.ttft.{name}") for name in TtftParts.__struct_fields__}
SPAN_OF = {LegKind.PREFILL: SpanName.PREFILL_LEG}

Headers = dict[str, str] | None

NOTHING: AbstractContextManager[None] = nullcontext()


class Tracing:
    """Spans when there is somebody to send them to; else only the client's own trace context is passed on."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.on = not isinstance(tracer, NoOpTracer)

    def request(self, flight: Flight) -> AbstractContextManager[None]:
        """Around a whole request."""
        return self._request(flight) if self.on else NOTHING

    def placement(self, flight: Flight) -> AbstractContextManager[None]:
        """Around one placement."""
        return self._placement(flight) if self.on else NOTHING

    def leg(self, flight: Flight, start: StartLeg) -> AbstractContextManager[Headers]:
        """Around one leg; gives the headers that its message carries."""
        return self._leg(flight, start) if self.on else nullcontext(flight.exchange.head.trace)

    @contextmanager
    def _request(self, flight: Flight) -> Iterator[None]:
        exchange, story = flight.exchange, flight.story
        attributes: dict[str, str] = {
            Attribute.REQUEST_ID: exchange.head.request_id,
            Attribute.HTTP_ROUTE: exchange.head.path,
        }
        context = extract(exchange.head.trace or {})
        span = self._tracer.start_span(SpanName.REQUEST, context, kind=SpanKind.SERVER, attributes=attributes)
        flight.span = span
        try:
            yield
        finally:
            _tell_request(span, flight)
            if story.status >= SERVER_ERROR:
                span.set_status(Status(StatusCode.ERROR, story.reason))
            span.end()

    @contextmanager
    def _placement(self, flight: Flight) -> Iterator[None]:
        with self._child(flight, SpanName.PLACE, SpanKind.INTERNAL):
            yield

    @contextmanager
    def _leg(self, flight: Flight, start: StartLeg) -> Iterator[Headers]:
        with self._child(flight, SPAN_OF.get(start.kind, SpanName.DECODE_LEG), SpanKind.CLIENT) as span:
            span.set_attribute(Attribute.LEG_ID, start.leg_id)
            span.set_attribute(Attribute.LEG_KIND, start.kind.value)
            span.set_attribute(Attribute.WORKER_ID, start.worker_id)
            yield inject(span)

    @contextmanager
    def _child(self, flight: Flight, name: SpanName, kind: SpanKind) -> Iterator[Span]:
        parent = flight.span
        context = set_span_in_context(parent) if parent is not None else None
        with self._tracer.start_as_current_span(name, context, kind=kind) as span:
            yield span


def _tell_request(span: Span, flight: Flight) -> None:
    story = flight.story
    span.set_attribute(Attribute.MODEL, flight.facts.model)
    span.set_attribute(Attribute.HTTP_STATUS, story.status)
    if story.reason:
        span.set_attribute(Attribute.REASON, story.reason)
    if flight.decision is not None:
        span.set_attribute(Attribute.DECISION_ID, flight.decision.decision_id)
    _, parts = first_token(flight)
    if parts is not None:
        span.set_attributes({key: getattr(parts, name) for name, key in TTFT_ATTRIBUTES.items()})
    if flight.attempts.resumes:
        span.set_attribute(Attribute.RESUMES, flight.attempts.resumes)
        span.set_attribute(Attribute.RESUMED_TOKENS, flight.attempts.resumed_tokens)
    placed = story.placed
    if placed is not None:
        span.set_attribute(Attribute.MODE, placed.mode.value)
        span.set_attribute(Attribute.DECODE_WORKER, placed.decode.record.worker_id)
        span.set_attribute(Attribute.PREDICTED_CACHED_TOKENS, placed.cached_tokens)
        if placed.prefill is not None:
            span.set_attribute(Attribute.PREFILL_WORKER, placed.prefill.record.worker_id)
    if story.report is not None:
        span.set_attribute(Attribute.INPUT_TOKENS, story.report.prompt_tokens)
        span.set_attribute(Attribute.OUTPUT_TOKENS, story.report.completion_tokens)
        span.set_attribute(Attribute.CACHED_TOKENS, story.report.cached_tokens)
        span.set_attribute(Attribute.RECEIVED_TOKENS, story.report.received_tokens)
        if story.report.kv is not None:
            span.set_attribute(Attribute.RECOMPUTED_TOKENS, story.report.kv.recomputed_tokens)
            span.set_attribute(Attribute.REPREFILLED_TOKENS, story.report.kv.reprefilled_tokens)
