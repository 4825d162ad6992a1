"""What a trace's spans must be, wherever they come from."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shared.telemetry.span_names import SpanName
from tests.support.otlp_receiver import Span

ADD_UP = 0.02
"""Of the time to the first token: how far its parts may be from it."""
ROUNDED_S = 1e-6
"""Instants are nanoseconds since 1970, which a float holds to less than that."""


def name_of(span: str) -> str:
    """A span's name without the path with which that of a request continues."""
    return span.partition(" /")[0]


def length(span: Span) -> float:
    """Seconds."""
    return span.end - span.start


def time_to_first_token(spans: list[Span]) -> tuple[float, dict[str, float]]:
    """How long it is, and how long each of its parts; asserts that they follow each other and add up to it."""
    (request,) = [span for span in spans if name_of(span.name) == SpanName.REQUEST]
    (whole,) = [span for span in spans if span.name == SpanName.FIRST_TOKEN]
    parts = sorted((span for span in spans if span.parent_id == whole.span_id), key=lambda span: span.start)
    assert whole.parent_id == request.span_id
    assert whole.start == pytest.approx(request.start, abs=ROUNDED_S)
    assert parts[0].start == pytest.approx(whole.start, abs=ROUNDED_S)
    assert all(later.start - earlier.end == pytest.approx(0.0, abs=ROUNDED_S) for earlier, later in pairwise(parts))
    lengths = {span.name: length(span) for span in parts}
    assert sum(lengths.values()) == pytest.approx(length(whole), rel=ADD_UP)
    return length(whole), lengths
