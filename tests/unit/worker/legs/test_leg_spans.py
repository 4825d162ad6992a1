"""Spans of a leg: the engine's work and the KV exchange."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracer, StatusCode

from services.worker.legs.server import show_leg
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.telemetry.span_names import Attribute, SpanName
from shared.telemetry.tracing import SOURCES_SHOWN_MAX
from tests.support.fake_clock import FakeClock

NOW = 1000.0
WALL_MS = 1_700_000_000_000
READ = KvRead(
    worker_id=WorkerId("p1"),
    epoch=Epoch(1),
    tokens=96,
    bytes=3_000_000,
    requested_at=NOW - 0.5,
    granted_at=NOW - 0.4,
    read_at=NOW - 0.3,
    ended_at=NOW - 0.1,
    read_s=0.002,
)


def shown(*reads: KvRead, **transfer_report) -> list[ReadableSpan]:
    """The leg's span, and then those of the exchange."""
    return drawn(LegReport(kv=KvTransferReport(reads=list(reads), **transfer_report)), NOW)


def drawn(report: LegReport, arrived_at: float) -> list[ReadableSpan]:
    """The leg's span, and then its children."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("serve leg") as leg:
        show_leg(tracer, leg, report, arrived_at, FakeClock(NOW, WALL_MS))
    *children, leg = exporter.get_finished_spans()
    return [leg, *children]


def of(**changes) -> KvRead:
    fields = {name: getattr(READ, name) for name in READ.__struct_fields__}
    return KvRead(**{**fields, **changes})


def offsets(span: ReadableSpan) -> tuple[float, float]:
    """Start and end, in seconds before NOW."""
    start, end = ((WALL_MS * 1_000_000 - at) / 1e9 for at in (span.start_time, span.end_time))
    return pytest.approx(start, abs=1e-6), pytest.approx(end, abs=1e-6)


def test_a_read_has_spans_for_lease_wait_and_read():
    leg, *children = shown(READ)

    assert [each.name for each in children] == [SpanName.LEASE, SpanName.WAIT, SpanName.READ]
    assert [offsets(each) for each in children] == [(0.5, 0.4), (0.4, 0.3), (0.3, 0.1)]
    assert {each.parent.span_id for each in children} == {leg.context.span_id}
    assert {each.context.trace_id for each in children} == {leg.context.trace_id}


def test_the_read_span_has_source_bytes_and_speed():
    *_others, read = shown(READ)

    assert read.attributes == {
        Attribute.KV_SOURCE: "p1",
        Attribute.KV_FOLLOWED: False,
        Attribute.KV_TOKENS: 96,
        Attribute.KV_BYTES: 3_000_000,
        Attribute.KV_GB_PER_S: 1.5,
    }
    assert read.status.status_code is StatusCode.UNSET


def test_an_offer_has_no_lease_span():
    _leg, *children = shown(of(requested_at=0.0))

    assert [each.name for each in children] == [SpanName.WAIT, SpanName.READ]


def test_a_lease_without_a_grant_is_one_failed_span():
    _leg, only = shown(of(granted_at=0.0, read_at=0.0, read_s=0.0, tokens=0, bytes=0, failure="p1 does not answer"))

    assert (only.name, offsets(only)) == (SpanName.LEASE, (0.5, 0.1))
    assert only.attributes[Attribute.KV_FAILURE] == "p1 does not answer"
    assert only.status.status_code is StatusCode.ERROR


def test_a_grant_whose_read_never_began_ends_in_the_wait():
    _leg, *children = shown(of(read_at=0.0, failure="the lease was about to end"))

    assert [each.name for each in children] == [SpanName.LEASE, SpanName.WAIT]
    assert [Attribute.KV_FAILURE in each.attributes for each in children] == [False, True]


def test_a_source_that_was_never_asked_has_a_span():
    _leg, only = shown(KvRead(worker_id=WorkerId("p2"), epoch=Epoch(1), failure="not connected"))

    assert (only.name, offsets(only)) == (SpanName.LEASE, (0.0, 0.0))
    assert only.attributes[Attribute.KV_SOURCE] == "p2"


def test_the_leg_span_has_the_recomputed_tokens():
    leg, *_children = shown(READ, recomputed_tokens=40, reprefilled_tokens=32)

    assert leg.attributes[Attribute.RECOMPUTED_TOKENS] == 40
    assert leg.attributes[Attribute.REPREFILLED_TOKENS] == 32


def test_spans_of_many_sources_are_bounded():
    _leg, *children = shown(*[READ] * (SOURCES_SHOWN_MAX + 5))

    assert len(children) == 3 * SOURCES_SHOWN_MAX


def test_queue_prefill_and_decode_spans_follow_each_other():
    report = LegReport(
        prompt_tokens=100, cached_tokens=32, received_tokens=60, completion_tokens=9, finish_reason="stop",
        queue_s=0.1, prefill_s=0.2, first_token_s=0.35, total_s=0.95,
    )  # fmt: skip

    leg, *children = drawn(report, NOW - 1.0)

    assert [each.name for each in children] == [SpanName.ENGINE_QUEUE, SpanName.ENGINE_PREFILL, SpanName.ENGINE_DECODE]
    assert [offsets(each) for each in children] == [(0.95, 0.85), (0.85, 0.65), (0.65, 0.05)]
    assert children[1].attributes == {Attribute.COMPUTED_TOKENS: 8, Attribute.CACHED_TOKENS: 32}
    assert leg.attributes[Attribute.FINISH_REASONS] == ("stop",)


def test_a_prefill_leg_has_no_decode_span():
    _leg, *children = drawn(LegReport(completion_tokens=1, prefill_s=0.2, first_token_s=0.3, total_s=0.4), NOW - 0.5)
    _leg, *none = drawn(LegReport(total_s=0.4), NOW - 0.5)

    assert [each.name for each in children] == [SpanName.ENGINE_QUEUE, SpanName.ENGINE_PREFILL]
    assert none == []


def test_without_tracing_no_span_is_made():
    tracer = NoOpTracer()
    with tracer.start_as_current_span("serve leg") as leg:
        show_leg(tracer, leg, LegReport(kv=KvTransferReport(reads=[READ])), NOW, FakeClock(NOW, WALL_MS))
