"""Spans that are created when they have ended, instead of being started and passed along.

Whether a request is traced is then decided at its end, and untraced requests cost nothing. Instants are on
the process's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from shared.telemetry.span_names import SpanName

About = dict[str, AttributeValue]


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
