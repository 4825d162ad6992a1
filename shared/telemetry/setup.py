"""Tracing for one process: OTLP over HTTP when an endpoint is set, nothing at all otherwise."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

log = logging.getLogger("baton.telemetry")

EXPORT_S_MAX = 2.0
"""One attempt to send spans; a dead receiver costs no more."""
SPANS_WAITING_MAX = 8192
EXPORT_PERIOD_S = 1.0


@dataclass(frozen=True)
class Telemetry:
    """What a process traces with."""

    tracer: trace.Tracer
    _provider: TracerProvider | None = None

    def shutdown(self, deadline_s: float) -> None:
        """Send what is left; a receiver that is gone delays this by at most ``deadline_s``."""
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
    resource = Resource.create(
        {
            "service.namespace": "baton",
            "service.name": f"baton-{service}",
            "service.instance.id": instance,
            "service.version": version,
        }
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(trace_sample_ratio)), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S_MAX)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=SPANS_WAITING_MAX, schedule_delay_millis=EXPORT_PERIOD_S * 1000)
    )
    return Telemetry(provider.get_tracer("baton"), provider)
