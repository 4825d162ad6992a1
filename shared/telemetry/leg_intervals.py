"""Trace intervals and attributes of a leg, from its ``LegReport`` and ``KvTransferReport``."""

from __future__ import annotations

import msgspec
from opentelemetry.util.types import AttributeValue

from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.telemetry.span_names import Attribute, SpanName

SOURCES_SHOWN_MAX = 16
"""KV sources of one leg that a trace shows; more would hide the rest of the trace."""

About = dict[str, AttributeValue]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of a leg, in seconds on the worker's monotonic clock."""

    name: SpanName
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
    """Attributes of a KV source."""
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
    """Attributes of a leg's report."""
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
    return about
