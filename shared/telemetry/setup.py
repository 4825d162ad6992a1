"""Spans and metrics of one process over OTLP/HTTP; disabled without an endpoint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk import _shared_internal
from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from shared.telemetry.metrics import Kind
from shared.telemetry.prometheus import Distribution, Family, Sample
from shared.telemetry.tracing import FinishedSpan, SpanSink

log = logging.getLogger("baton.telemetry")

EXPORT_S_MAX = 2.0
"""Longest attempt to send spans."""
SPANS_WAITING_MAX = 8192
EXPORT_PERIOD_S = 1.0
WARNING_PERIOD_S = 60.0
"""Shortest interval between warnings that the receiver does not accept spans."""
SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
WELL = trace.Status()
UCUM = {"seconds": "s", "bytes": "By", "ratio": "1", "1": "1"}
"""Units in UCUM, as OpenTelemetry expects; units of counted things are written in braces."""


@dataclass(frozen=True)
class Telemetry:
    """``tracer`` makes spans that are passed along, ``sink`` takes finished spans."""

    tracer: trace.Tracer
    sink: SpanSink | None = None
    _provider: TracerProvider | None = None

    def shutdown(self, deadline_s: float) -> None:
        """Send the remaining spans, for at most ``deadline_s``."""
        provider = self._provider
        if provider is None:
            return
        sending = threading.Thread(target=provider.shutdown, name="flush-spans", daemon=True)
        sending.start()
        sending.join(deadline_s)
        if sending.is_alive():
            log.warning("the OTLP receiver did not answer: the last spans are lost")


def setup(
    service: str, instance: str, *, otlp_endpoint: str, trace_sample_ratio: float = 1.0, version: str = ""
) -> Telemetry:
    """A tracer for this process; a no-op one when ``otlp_endpoint`` is empty."""
    if not otlp_endpoint:
        return Telemetry(trace.NoOpTracer())
    provider = TracerProvider(
        resource=_resource(service, instance, version),
        # Workers start no traces; the router decides which legs are traced.
        sampler=ParentBased(ALWAYS_OFF if service == "worker" else TraceIdRatioBased(trace_sample_ratio)),
        shutdown_on_exit=False,
    )
    processor = BatchSpanProcessor(
        SpanExporter(otlp_endpoint, export_s_max=EXPORT_S_MAX, now=time.monotonic),
        max_queue_size=SPANS_WAITING_MAX,
        schedule_delay_millis=EXPORT_PERIOD_S * 1000,
    )
    provider.add_span_processor(processor)
    return Telemetry(
        provider.get_tracer("baton", version),
        FinishedSpanSink(processor, provider.resource, scope_of(version), trace_sample_ratio),
        provider,
    )


class FinishedSpanSink:
    """A ``SpanSink`` in front of the same exporter. The SDK's own mutable spans cost three times as much."""

    def __init__(
        self, processor: SpanProcessor, resource: Resource, scope: InstrumentationScope, sample_ratio: float
    ) -> None:
        self.sample_ratio = sample_ratio
        self._processor = processor
        self._resource = resource
        self._scope = scope

    def draw(self, trace_id: int, spans: Sequence[FinishedSpan]) -> None:
        """Queue them for export."""
        began_ns = time.time_ns() - time.monotonic_ns()
        for span in spans:
            self._processor.on_end(self._readable(trace_id, span, began_ns))

    def _readable(self, trace_id: int, span: FinishedSpan, began_ns: int) -> ReadableSpan:
        above = trace.SpanContext(trace_id, span.parent_id, span.parent_is_remote, SAMPLED) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=trace.SpanContext(trace_id, span.span_id, is_remote=False, trace_flags=SAMPLED),
            parent=above,
            resource=self._resource,
            attributes=span.about,
            kind=span.kind,
            status=WELL if span.error is None else trace.Status(trace.StatusCode.ERROR, span.error),
            start_time=began_ns + round(span.begun_at * 1e9),
            end_time=began_ns + round(span.ended_at * 1e9),
            instrumentation_scope=self._scope,
        )


class SpanExporter(OTLPSpanExporter):
    """The SDK's exporter logs two lines a second while the receiver is away; this one logs once a minute."""

    def __init__(self, otlp_endpoint: str, *, export_s_max: float, now: Callable[[], float]) -> None:
        for talkative in (OTLPSpanExporter.__module__, _shared_internal.__name__):
            logging.getLogger(talkative).setLevel(logging.CRITICAL)
        super().__init__(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/traces", timeout=export_s_max)
        self._receiver = otlp_endpoint
        self._now = now
        self._warned_at: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans; they are dropped on failure."""
        result = super().export(spans)
        now, before = self._now(), self._warned_at
        if result is SpanExportResult.SUCCESS:
            if before is not None:
                log.info("the OTLP receiver %s accepts spans again", self._receiver)
            self._warned_at = None
        elif before is None or now - before >= WARNING_PERIOD_S:
            log.warning("the OTLP receiver %s does not accept spans: they are lost", self._receiver)
            self._warned_at = now
        return result


def scope_of(version: str) -> InstrumentationScope:
    """What names Baton as the origin of spans and metrics."""
    return InstrumentationScope("baton", version)


def _resource(service: str, instance: str, version: str) -> Resource:
    return Resource.create(
        {
            "service.namespace": "baton",
            "service.name": f"baton-{service}",
            "service.instance.id": instance,
            "service.version": version,
        }
    )


class MetricsPush:
    """Sends families to an OTLP receiver, without the SDK's instruments, which cannot drop a series."""

    def __init__(self, service: str, instance: str, *, otlp_endpoint: str, started_ns: int, version: str) -> None:
        self._resource = _resource(service, instance, version)
        self._scope = scope_of(version)
        self._started_ns = started_ns
        # The SDK logs three lines a second while the receiver is away; the caller of push logs once.
        logging.getLogger(OTLPMetricExporter.__module__).setLevel(logging.CRITICAL)
        self._exporter = OTLPMetricExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/metrics", timeout=EXPORT_S_MAX)

    def push(self, families: Iterable[Family], now_ns: int) -> bool:
        """Whether the receiver accepted them. Blocks for at most ``EXPORT_S_MAX``: call it in a thread."""
        metrics = [self._metric(family, now_ns) for family in families if family.samples]
        scope = otlp.ScopeMetrics(self._scope, metrics, schema_url="")
        message = otlp.MetricsData([otlp.ResourceMetrics(self._resource, [scope], schema_url="")])
        return self._exporter.export(message) is otlp.MetricExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _metric(self, family: Family, now_ns: int) -> otlp.Metric:
        metric = family.metric
        numbers = [
            self._number(family, each, each.value, now_ns)
            for each in family.samples
            if isinstance(each.value, float | int)
        ]
        data: otlp.Sum | otlp.Gauge | otlp.Histogram
        match metric.kind:
            case Kind.COUNTER:
                data = otlp.Sum(numbers, otlp.AggregationTemporality.CUMULATIVE, is_monotonic=True)
            case Kind.GAUGE:
                data = otlp.Gauge(numbers)
            case Kind.HISTOGRAM:
                points = [
                    self._histogram(family, each, each.value, now_ns)
                    for each in family.samples
                    if isinstance(each.value, Distribution)
                ]
                data = otlp.Histogram(points, otlp.AggregationTemporality.CUMULATIVE)
        return otlp.Metric(metric.name, metric.meaning, UCUM.get(metric.unit, f"{{{metric.unit}}}"), data)

    def _number(self, family: Family, sample: Sample, value: float, now_ns: int) -> otlp.NumberDataPoint:
        return otlp.NumberDataPoint(_attributes(family, sample), self._started_ns, now_ns, value)

    def _histogram(self, family: Family, sample: Sample, value: Distribution, now_ns: int) -> otlp.HistogramDataPoint:
        return otlp.HistogramDataPoint(
            attributes=_attributes(family, sample),
            start_time_unix_nano=self._started_ns,
            time_unix_nano=now_ns,
            count=sum(value.counts),
            sum=value.sum,
            bucket_counts=value.counts,
            explicit_bounds=family.metric.buckets,
            min=None,  # type: ignore[arg-type]  # Optional on the wire, and not recorded.
            max=None,  # type: ignore[arg-type]
        )


def _attributes(family: Family, sample: Sample) -> dict[str, str]:
    return dict(zip(family.metric.labels, sample.labels, strict=True))
