"""Spans of a leg: the engine's work, and for each source of KV a lease, a wait and a read. Made at the leg's end."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from shared.contracts.inference import LegReport
from shared.runtime.clock import Clock
from shared.telemetry.leg_intervals import Interval, engine_intervals, exchange_intervals, report_of


def show_leg(tracer: Tracer, leg: Span, report: LegReport, arrived_at: float, clock: Clock) -> None:
    """Attributes and children of the leg's span. Costs nothing without tracing."""
    if not leg.is_recording():
        return
    leg.set_attributes(report_of(report))
    now = clock.now()
    intervals = engine_intervals(report, arrived_at)
    if report.kv is not None:
        intervals += exchange_intervals(report.kv, now)
    show(tracer, leg, intervals, began_ns=clock.wall_ms() * 1_000_000 - round(now * 1e9))


def show(tracer: Tracer, above: Span, intervals: list[Interval], *, began_ns: int) -> None:
    """The intervals as spans. ``began_ns``: wall-clock time at which the monotonic clock was 0."""
    context = set_span_in_context(above)
    for interval in intervals:
        begun_ns = began_ns + round(interval.begun_at * 1e9)
        span = tracer.start_span(interval.name, context=context, attributes=interval.about, start_time=begun_ns)
        if interval.failure:
            span.set_status(Status(StatusCode.ERROR, interval.failure))
        span.end(began_ns + round(interval.ended_at * 1e9))
