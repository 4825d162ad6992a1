"""W3C trace context in message headers, and spans that are created when they have ended, instead of being started and
passed along.

Whether a request is traced is then decided at its end, and untraced requests cost nothing. Instants are on
the process's monotonic clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shared.telemetry.span_names import SpanName

About = dict[str, AttributeValue]
_W3C = TraceContextTextMapPropagator()

HEADER = "traceparent"
IDS = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
NOT_TRACED: Mapping[str, str] = {HEADER: f"00-{1:032x}-{1:016x}-00"}
"""Headers of requests that are never traced."""


class FinishedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One span."""

    name: SpanName
    begun_at: float
    ended_at: float
    span_id: int
    parent_id: int = 0
    """0: no parent."""
    parent_is_remote: bool = False
    kind: SpanKind = SpanKind.INTERNAL
    about: About = {}
    error: str | None = None
    """The kind of error in one word; None without an error."""


class SpanSink(Protocol):
    """Receives finished spans. ``sample_ratio``: the share of ordinary requests that are traced."""

    sample_ratio: float

    def draw(self, trace_id: int, spans: Sequence[FinishedSpan]) -> None:
        """Take the spans of one trace; does not wait."""


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
