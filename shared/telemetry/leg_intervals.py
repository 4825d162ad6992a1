"""What an engine did with a leg, from when to when, as its report and its transfer_report tell: as a trace shows it."""

from __future__ import annotations

import msgspec
from opentelemetry.util.types import AttributeValue

from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.telemetry.span_names import Attribute, SpanName

SOURCES_SHOWN_MAX = 16
"""Of one leg; more would hide the rest of the trace."""

About = dict[str, AttributeValue]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """One of them; instants on the worker's monotonic clock."""

    name: SpanName
    begun_at: float
    ended_at: float
    about: About = {}
    failure: str = ""


def engine_intervals(report: LegReport, arrived_at: float) -> list[Interval]:
    """Queue, prefill and decode of a leg that came to its worker then; none where the engine made no token."""
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
    """For each source a lease, a wait and a read; what never ended ends ``now``."""
    return [interval for read in transfer_report.reads[:SOURCES_SHOWN_MAX] for interval in intervals_of(read, now)]


def first_ask_at(transfer_report: KvTransferReport) -> float | None:
    """When the exchange began, on the worker's clock; None where there was none."""
    return min(
        (at for read in transfer_report.reads if (at := read.asked_at or read.granted_at or read.read_at)), default=None
    )


def intervals_of(read: KvRead, now: float) -> list[Interval]:
    """What was done with one source; at least one interval, and the last one has its outcome."""
    marks = ((SpanName.LEASE, read.asked_at), (SpanName.WAIT, read.granted_at), (SpanName.READ, read.read_at))
    ended = read.ended_at or now
    begun = [(name, at) for name, at in marks if at] or [(SpanName.LEASE, ended)]
    ends = [at for _name, at in begun[1:]] + [ended]
    whom = source_of(read)
    intervals = [
        Interval(name=name, begun_at=start, ended_at=max(start, end), about=whom)
        for (name, start), end in zip(begun, ends, strict=True)
    ]
    last = msgspec.structs.replace(intervals[-1], about=whom | outcome_of(read), failure=read.failure)
    return [*(interval for interval in intervals[:-1] if interval.ended_at > interval.begun_at), last]


def source_of(read: KvRead) -> About:
    """From whom, and how."""
    return {Attribute.KV_SOURCE: read.worker_id, Attribute.KV_FOLLOWED: read.followed}


def outcome_of(read: KvRead) -> About:
    """What came of it, and why not more."""
    outcome: About = {Attribute.KV_TOKENS: read.tokens, Attribute.KV_BYTES: read.bytes}
    if read.read_s > 0.0:
        outcome[Attribute.KV_GB_PER_S] = read.bytes / read.read_s / 1e9
    if read.failure:
        outcome[Attribute.KV_FAILURE] = read.failure
    return outcome


def report_of(report: LegReport) -> About:
    """The report, where a trace shows it."""
    return {
        **tokens_of(report),
        Attribute.RECEIVED_BYTES: report.received_bytes,
        Attribute.QUEUE_S: report.queue_s,
        Attribute.PREFILL_S: report.prefill_s,
        Attribute.FIRST_TOKEN_S: report.first_token_s,
    }


def tokens_of(report: LegReport) -> About:
    """How many, where from, and how they ended."""
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
