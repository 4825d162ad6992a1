"""The disaggregation report: whether separate prefill and decode workers pay off, as the collector measures it."""

from __future__ import annotations

import msgspec

from shared.contracts.message import Message


class AskDisaggregationReport(Message, frozen=True, kw_only=True):
    """Any client -> collector."""

    model: str = ""
    """Empty: all models."""


class ReportBucket(Message, frozen=True, kw_only=True):
    """Comparison for one range of prompt lengths."""

    model: str
    tokens_min: int
    tokens_max: int
    """Both bounds are inclusive."""
    disaggregated: int = 0
    """Number of disaggregated requests, likewise ``aggregated``."""
    aggregated: int = 0
    ttft_s: float = 0.0
    """Measured median of the disaggregated requests; likewise ``itl_s`` and ``e2e_s``."""
    itl_s: float = 0.0
    e2e_s: float = 0.0
    other_ttft_s: float = 0.0
    """The same for aggregated serving: measured with enough such requests, else estimated."""
    other_itl_s: float = 0.0
    other_e2e_s: float = 0.0
    measured: bool = False
    """Whether the aggregated latencies were measured."""
    worth: str = ""
    """Whether disaggregation pays off: yes, no or unsure."""
    reason: str = ""


class DisaggregationReport(Message, frozen=True, kw_only=True):
    """Collector -> client."""

    seconds: float = 0.0
    """Length of the window that it covers."""
    buckets: list[ReportBucket] = msgspec.field(default_factory=list)
    summary: str = ""
    """One sentence for the operator."""
