"""An OTLP/HTTP receiver inside the test: it keeps the spans and metrics that processes send it."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


@dataclass(frozen=True)
class Span:
    """One span, with ids as hexadecimal text and times in seconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start: float
    end: float
    attributes: dict[str, Any]


class OtlpReceiver:
    """``with OtlpReceiver() as receiver``; ``receiver.endpoint`` is for BATON_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: dict[str, Metric] = {}
        """The newest of each name."""
        self.changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for(self, holds: Any, s_max: float = 60.0) -> bool:
        """Until ``holds()``, looked at after each message; whether it came to hold in time."""
        with self.changed:
            return self.changed.wait_for(holds, s_max)

    def take(self, path: str, body: bytes) -> None:
        """One export."""
        with self.changed:
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    facts = _attributes(resource.resource.attributes)
                    self.spans += [_span(span, facts) for scope in resource.scope_spans for span in scope.spans]
            elif path == "/v1/metrics":
                for metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    self.metrics |= {each.name: each for scope in metrics.scope_metrics for each in scope.metrics}
            self.changed.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                packed = self.headers.get("content-encoding") == "gzip"
                receiver.take(self.path, gzip.decompress(body) if packed else body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                return

        return Handler


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=resource.get("service.name", ""),
        instance=resource.get("service.instance.id", ""),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
    )
