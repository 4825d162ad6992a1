"""Trace context, logs and names."""

from __future__ import annotations

import json
import logging

import pytest
from opentelemetry import trace
from prometheus_client import CollectorRegistry, generate_latest

from shared.telemetry import names
from shared.telemetry.log import JsonLines, Text
from shared.telemetry.metrics import Kind
from shared.telemetry.names import METRICS
from shared.telemetry.prometheus import counter, gauge, histogram
from shared.telemetry.propagation import extract, inject
from shared.telemetry.setup import setup


def test_without_an_endpoint_nothing_is_traced_and_nothing_is_carried():
    telemetry = setup("router", "r1", otlp_endpoint="")

    with telemetry.tracer.start_as_current_span("request"):
        assert inject() is None
    telemetry.shutdown(0.1)


def test_a_span_travels_in_headers_to_its_child():
    span = trace.NonRecordingSpan(trace.SpanContext(7, 9, is_remote=False, trace_flags=trace.TraceFlags(1)))

    headers = inject(span)

    assert headers is not None
    parent = trace.get_current_span(extract(headers)).get_span_context()
    assert (parent.trace_id, parent.span_id, parent.is_remote) == (7, 9, True)


def test_headers_without_a_trace_are_no_parent():
    assert not trace.get_current_span(extract({})).get_span_context().is_valid


def record(message: str, **extra) -> logging.LogRecord:
    made = logging.LogRecord("baton.router", logging.WARNING, __file__, 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_a_json_line_carries_who_what_and_the_facts():
    line = json.loads(JsonLines("router", "r1").format(record("request ended", facts={"status": 200})))

    assert (line["service"], line["instance"], line["level"]) == ("router", "r1", "warning")
    assert (line["message"], line["status"]) == ("request ended", 200)


def test_a_text_line_is_for_people():
    line = Text("router", "router-1").format(record("request ended", facts={"status": 200}))

    assert line.endswith("router-1 WARNING request ended status=200")


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_is_named_as_prometheus_wants_it(metric):
    assert metric.name.startswith("baton_")
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.meaning.endswith(".")
    if metric.unit in {"seconds", "bytes"}:
        assert metric.unit in metric.name
    make = {Kind.COUNTER: counter, Kind.GAUGE: gauge, Kind.HISTOGRAM: histogram}[metric.kind]
    registry = CollectorRegistry()
    made = make(metric, registry)
    (made.labels(*["x"] * len(metric.labels)) if metric.labels else made)
    assert f"# HELP {metric.name}" in generate_latest(registry).decode()


def test_every_metric_in_the_file_is_in_the_table():
    constants = {value.name for value in vars(names).values() if isinstance(value, names.Metric)}

    assert constants == set(METRICS)


def test_what_a_client_made_up_does_not_look_like_a_line_of_ours():
    line = Text("router", "router-1").format(
        record("request", facts={"model": "m\n07:00:00.000 router-1 ERROR hacked"})
    )

    assert "\n" not in line
