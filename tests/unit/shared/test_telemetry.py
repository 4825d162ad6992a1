"""Trace context, logs and names."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from shared.telemetry import names
from shared.telemetry.log import TRACE_ID, JsonLines, Text
from shared.telemetry.metrics import Kind
from shared.telemetry.names import METRICS
from shared.telemetry.prometheus import Distribution, Family, Sample, counter, gauge, histogram, page, to_prometheus
from shared.telemetry.setup import setup
from shared.telemetry.tracing import extract, inject, trace_named


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


def test_a_json_line_has_process_message_and_fields():
    line = json.loads(JsonLines("router", "r1").format(record("request ended", facts={"status": 200})))

    assert (line["service"], line["instance"], line["level"]) == ("router", "r1", "warning")
    assert (line["message"], line["status"]) == ("request ended", 200)


def test_a_log_line_names_its_trace(current_trace):
    for formatter in (JsonLines("router", "r1"), Text("router", "r1")):
        assert current_trace in formatter.format(record("request", facts={"status": 200}))


def test_an_explicit_trace_id_takes_precedence(current_trace):
    line = json.loads(JsonLines("router", "r1").format(record("request", facts={"trace_id": "b" * 32})))

    assert line["trace_id"] == "b" * 32 != current_trace


@pytest.fixture
def current_trace() -> Iterator[str]:
    token = TRACE_ID.set("a" * 32)
    yield "a" * 32
    TRACE_ID.reset(token)


@pytest.mark.parametrize("header", ["", "00-1-2-3", f"00-{0:032x}-{1:016x}-01", f"00-{'g' * 32}-{1:016x}-01"])
def test_headers_that_name_no_trace(header):
    assert trace_named({"traceparent": header}) == trace_named(None) == ""


def test_headers_that_name_a_trace():
    assert trace_named({"traceparent": f"00-{7:032x}-{1:016x}-01"}) == f"{7:032x}"


def test_colour_is_for_terminals_alone():
    plain, painted = (Text("router", "r1", colour=colour).format(record("slow")) for colour in (False, True))

    assert "\x1b" not in plain
    assert "\x1b[33mWARNING slow\x1b[0m" in painted


def test_a_text_line_is_for_people():
    line = Text("router", "router-1").format(record("request ended", facts={"status": 200}))

    assert line.endswith("router-1 WARNING request ended status=200")


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_name_follows_prometheus_conventions(metric):
    assert metric.name.startswith(("baton_", "vllm:"))
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.meaning.endswith(".")
    if metric.unit in {"seconds", "bytes"}:
        assert metric.unit in metric.name
    make = {Kind.COUNTER: counter, Kind.GAUGE: gauge, Kind.HISTOGRAM: histogram}[metric.kind]
    registry = CollectorRegistry()
    made = make(metric, registry)
    (made.labels(*["x"] * len(metric.labels)) if metric.labels else made)
    assert f"# HELP {metric.name}" in generate_latest(registry).decode()


EMPTY = Distribution([0] * (len(names.ROUTER_TTFT.buckets) + 1), 0.0)


def shown(registry: CollectorRegistry) -> list[str]:
    """Both formats, without the numbers that are times."""
    text = generate_latest(registry).decode() + openmetrics(registry).decode()
    return [re.sub(r"(?<=[0-9]) [0-9.]+$", "", line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("accept", "begins"),
    [
        ("", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
    ],
)
def test_a_page_has_the_format_that_is_asked_for_and_no_times_of_creation(accept: str, begins: str):
    registry = CollectorRegistry()
    counter(names.ROUTER_PROMPT_TOKENS, registry)
    families = [Family(names.ROUTER_TTFT, [Sample(("aggregated",) * len(names.ROUTER_TTFT.labels), EMPTY)])]

    for body, content_type in (page(registry, accept), to_prometheus(families, accept)):
        assert content_type.startswith(begins)
        assert body.endswith(b"# EOF\n") == begins.startswith("application")
        assert b"_created" not in body


def test_plain_series_show_what_prometheus_clients_own_objects_show():
    dice, ours, theirs = random.Random(5), CollectorRegistry(), CollectorRegistry()
    bare, labelled, timed = names.ROUTER_PROMPT_TOKENS, names.ROUTER_PLACEMENTS, names.ROUTER_TTFT
    counters = [
        (counter(metric, ours), Counter(metric.name, metric.meaning, metric.labels, registry=theirs))
        for metric in (bare, labelled)
    ]
    times = (
        histogram(timed, ours),
        Histogram(timed.name, timed.meaning, timed.labels, registry=theirs, buckets=timed.buckets),
    )
    assert shown(ours) == shown(theirs)
    for _ in range(200):
        labels, amount = (dice.choice(["a", 'b"\n']), dice.choice(["x", "y"])), dice.randrange(5)
        for (mine, reference), values in zip(counters, ((), labels), strict=True):
            mine.labels(*values).value += amount
            (reference.labels(*values) if values else reference).inc(amount)
        seconds, trace_id = dice.choice([*timed.buckets, dice.expovariate(1.0), 1000.0]), dice.choice(["", "ab" * 16])
        times[0].labels(labels[0]).observe(seconds, trace_id)
        times[1].labels(labels[0]).observe(seconds, {"trace_id": trace_id} if trace_id else None)
    assert shown(ours) == shown(theirs)


def test_every_metric_in_the_file_is_in_the_table():
    constants = {value.name for value in vars(names).values() if isinstance(value, names.Metric)}

    assert constants == set(METRICS)


FORGED = "m\r\n07:00:00.000 router-1 ERROR forged\x1b[2J\u2028\x85\x9b31m\ud800"
"""Ends of lines of all kinds, orders to a terminal, and half a character."""


def lines_of(formatter: logging.Formatter) -> str:
    """The same made-up text wherever a client's words may come to stand: message, fact, exception."""
    try:
        raise ValueError(FORGED)
    except ValueError:
        failed = record("bad %s", facts={"model": FORGED, FORGED: 1})
        failed.args, failed.exc_info = (FORGED,), sys.exc_info()
    return formatter.format(failed)


def test_what_a_client_made_up_does_not_begin_a_line_of_ours():
    first, *rest = lines_of(Text("router", "router-1")).split("\n")

    assert first.isprintable()
    assert "forged" in first
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_a_json_line_is_one_line_of_ascii_whatever_is_in_it():
    line = lines_of(JsonLines("router", "router-1"))

    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert told["model"] == FORGED
    assert told["message"] == f"bad {FORGED}"
