"""An unreachable receiver of spans costs a log line now and then, and little time at exit."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from shared.telemetry.setup import EXPORT_S_MAX, WARNING_PERIOD_S, SpanExporter, setup
from tests.support.otlp_receiver import OtlpReceiver

SPANS = 3000
"""More than one export takes."""


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_a_receiver_that_is_away_is_complained_about_once_in_a_while(caplog):
    now = 1000.0
    receiver = OtlpReceiver()  # It accepts connections, and nobody answers them.
    exporter = SpanExporter(receiver.endpoint, export_s_max=0.3, now=lambda: now)

    for _ in range(3):
        exporter.export([])
    assert len(said(caplog)) == 1

    now += WARNING_PERIOD_S
    exporter.export([])
    assert len(said(caplog)) == 2

    with receiver, caplog.at_level(logging.INFO):
        exporter.export([])
    assert "accepts spans again" in caplog.messages[-1]


def test_exporting_at_exit_is_bounded_by_its_deadline(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        telemetry = setup("router", "r1", otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(SPANS):
            telemetry.tracer.start_span("request").end()

        begun = time.monotonic()
        telemetry.shutdown(0.2)

        assert time.monotonic() - begun < EXPORT_S_MAX
    assert len(said(caplog)) <= 2
