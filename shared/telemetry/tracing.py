"""W3C trace context in message headers, and spans that are created when they have ended, instead of being started and
passed along; what is traced of a leg, from its ``LegReport`` and ``KvTransferReport``.

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

from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.telemetry.span_names import Attribute, SpanName

About = dict[str, AttributeValue]
_W3C = TraceContextTextMapPropagator()

HEADER = "traceparent"
IDS = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
NOT_TRACED: Mapping[str, str] = {HEADER: f"00-{1:032x}-{1:016x}-00"}
"""Headers of requests that are never traced."""


class FinishedSpan(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """A SpanName; that of a request is followed by its path."""
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


SOURCES_SHOWN_MAX = 16
"""KV sources of one leg that a trace shows; more would hide the rest of the trace."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of a leg, in seconds on the worker's monotonic clock."""

    name: str
    """A SpanName; that of a request is followed by its path."""
    begun_at: float
    ended_at: float
    about: About = {}
    failure: str = ""


def engine_intervals(report: LegReport, arrived_at: float) -> list[Interval]:
    """Queue, prefill and decode of a leg that arrived at ``arrived_at``; empty when the engine generated no token."""
    if report.first_token_s <= 0.0:
        return []
    first_at = arrived_at + report.first_token_s
    scheduled_at = max(arrived_at, first_at - report.prefill_s)
    queued_at = max(arrived_at, scheduled_at - report.queue_s)
    computed = max(0, report.prompt_tokens - report.cached_tokens - report.received_tokens)
    intervals = [
        Interval(name=SpanName.ENGINE_QUEUE, begun_at=queued_at, ended_at=scheduled_at),
        Interval(
            name=SpanName.ENGINE_PREFILL,
            begun_at=scheduled_at,
            ended_at=first_at,
            about={Attribute.COMPUTED_TOKENS: computed, Attribute.CACHED_TOKENS: report.cached_tokens},
        ),
    ]
    if report.completion_tokens > 1:
        about: About = {Attribute.OUTPUT_TOKENS: report.completion_tokens}
        ended_at = max(first_at, arrived_at + report.total_s)
        intervals.append(Interval(name=SpanName.ENGINE_DECODE, begun_at=first_at, ended_at=ended_at, about=about))
    return intervals


def exchange_intervals(transfer_report: KvTransferReport, now: float) -> list[Interval]:
    """Lease, wait and read intervals of each source. An unfinished one ends ``now``."""
    return [interval for read in transfer_report.reads[:SOURCES_SHOWN_MAX] for interval in intervals_of(read, now)]


def first_request_at(transfer_report: KvTransferReport) -> float | None:
    """When the first KV was requested, on the worker's clock; None without an exchange."""
    return min(
        (at for read in transfer_report.reads if (at := read.requested_at or read.granted_at or read.read_at)),
        default=None,
    )


def intervals_of(read: KvRead, now: float) -> list[Interval]:
    """The intervals of one source, at least one; the last has the outcome."""
    marks = ((SpanName.LEASE, read.requested_at), (SpanName.WAIT, read.granted_at), (SpanName.READ, read.read_at))
    ended = read.ended_at or now
    begun = [(name, at) for name, at in marks if at] or [(SpanName.LEASE, ended)]
    ends = [at for _name, at in begun[1:]] + [ended]
    source = source_of(read)
    intervals = [
        Interval(name=name, begun_at=start, ended_at=max(start, end), about=source)
        for (name, start), end in zip(begun, ends, strict=True)
    ]
    last = msgspec.structs.replace(intervals[-1], about=source | outcome_of(read), failure=read.failure)
    return [*(interval for interval in intervals[:-1] if interval.ended_at > interval.begun_at), last]


def source_of(read: KvRead) -> About:
    return {Attribute.KV_SOURCE: read.worker_id, Attribute.KV_FOLLOWED: read.followed}


def outcome_of(read: KvRead) -> About:
    """Attributes of a read's result."""
    outcome: About = {Attribute.KV_TOKENS: read.tokens, Attribute.KV_BYTES: read.bytes}
    if read.read_s > 0.0:
        outcome[Attribute.KV_GB_PER_S] = read.bytes / read.read_s / 1e9
    if read.failure:
        outcome[Attribute.KV_FAILURE] = read.failure
    return outcome


def report_of(report: LegReport) -> About:
    return {
        **tokens_of(report),
        Attribute.RECEIVED_BYTES: report.received_bytes,
        Attribute.QUEUE_S: report.queue_s,
        Attribute.PREFILL_S: report.prefill_s,
        Attribute.FIRST_TOKEN_S: report.first_token_s,
    }


def tokens_of(report: LegReport) -> About:
    """Attributes of a leg's token counts and finish reason."""
    about: About = {
        Attribute.INPUT_TOKENS: report.prompt_tokens,
        Attribute.OUTPUT_TOKENS: report.completion_tokens,
        Attribute.CACHED_TOKENS: report.cached_tokens,
        Attribute.RECEIVED_TOKENS: report.received_tokens,
    }
    if report.finish_reason:
        about[Attribute.FINISH_REASONS] = (report.finish_reason,)
    if report.kv is not None:
        about[Attribute.RECOMPUTED_TOKENS] = report.kv.recomputed_tokens
        about[Attribute.REPREFILLED_TOKENS] = report.kv.reprefilled_tokens
        if report.kv.drafted_tokens:
            about[Attribute.DRAFTED_TOKENS] = report.kv.drafted_tokens
            about[Attribute.ACCEPTED_TOKENS] = report.kv.accepted_tokens
        about[Attribute.FIRST_TOKEN_RECEIVED] = report.kv.first_token_received
    return about
