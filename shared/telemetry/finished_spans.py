"""Spans that are drawn when all is known of them, instead of being carried along.

Whoever draws at the end can decide at the end, and pays nothing for what nobody wants to see. Instants are on the
process's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from shared.telemetry.span_names import SpanName

About = dict[str, AttributeValue]


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """One span."""

    name: SpanName
    begun_at: float
    ended_at: float
    span_id: int
    parent_id: int = 0
    """0: nobody's child."""
    parent_is_remote: bool = False
    kind: SpanKind = SpanKind.INTERNAL
    about: About = {}
    error: str | None = None
    """What went wrong, in a word; None when nothing did."""


class SpanSink(Protocol):
    """Where spans go. ``sample_ratio``: the share of the requests that are traced although nothing is odd about
    them.
    """

    sample_ratio: float

    def draw(self, trace_id: int, spans: Sequence[Drawn]) -> None:
        """Take the spans of one trace; never waits."""
