"""Whether splitting prefill from decode is worth it here, as the collector estimates from what it measured."""

from __future__ import annotations

import msgspec

from shared.contracts.message import Message


class AskDisaggregationReport(Message, frozen=True, kw_only=True):
    """Anyone -> collector."""

    model: str = ""
    """Empty: all."""


class ReportBucket(Message, frozen=True, kw_only=True):
    """Requests of one range of prompt lengths."""

    model: str
    tokens_min: int
    tokens_max: int
    """Prompt tokens, both included."""
    disaggregated: int = 0
    """Requests that were served so."""
    aggregated: int = 0
    ttft_s: float = 0.0
    """Median of the disaggregated ones, measured; likewise ``itl_s`` and ``e2e_s``."""
    itl_s: float = 0.0
    e2e_s: float = 0.0
    other_ttft_s: float = 0.0
    """What aggregated serving would have given; measured where there are enough such requests, else estimated."""
    other_itl_s: float = 0.0
    other_e2e_s: float = 0.0
    measured: bool = False
    """Whether the other side was measured."""
    worth: str = ""
    """yes, no, or unsure."""
    why: str = ""


class DisaggregationReport(Message, frozen=True, kw_only=True):
    """Collector -> anyone."""

    seconds: float = 0.0
    """What it looks back on."""
    buckets: list[ReportBucket] = msgspec.field(default_factory=list)
    words: str = ""
    """One or two sentences for a person."""
