"""W3C trace context in message headers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()

HEADER = "traceparent"
IDS = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
NOT_TRACED: Mapping[str, str] = {HEADER: f"00-{1:032x}-{1:016x}-00"}
"""Headers of requests that are never traced."""


def inject(span: trace.Span | None = None) -> dict[str, str] | None:
    """Headers that propagate this span, or the current one; None without a valid span."""
    carried = trace.get_current_span() if span is None else span
    if not carried.get_span_context().is_valid:
        return None
    headers: dict[str, str] = {}
    _W3C.inject(headers, trace.set_span_in_context(carried))
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The context to start a span in. Header names are lower case."""
    return _W3C.extract(headers, Context())


def trace_named(headers: Mapping[str, str] | None) -> str:
    """The trace id in these headers; empty if there is none."""
    found = IDS.match((headers or {}).get(HEADER, ""))
    return found[1] if found is not None else ""
