"""The request log has one line per finished request, with its trace and decision ids."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from services.router.settings import Settings
from shared.telemetry.log import JsonLines
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.router.streams import streams
from tests.unit.router.world import COMPLETIONS, open_world, prompt

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACED = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def written(caplog) -> Iterator[io.StringIO]:
    """The router's request log as parsed JSON."""
    caplog.set_level(logging.INFO, "baton.request")
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines("router", "router-1"))
    logger = logging.getLogger("baton.request")
    logger.addHandler(handler)
    yield out
    logger.removeHandler(handler)


def lines(written: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def asked(body: dict, path: str = COMPLETIONS, **headers: str) -> None:
    """Send one request to a prefill and a decode worker."""

    async def main() -> None:
        async with open_world(Settings(log_requests=True)) as world:
            await world.pair(decode=streams())
            await asyncio.sleep(1.0)  # a time of 0 means unset
            await world.ask(body, path=path, **headers)

    run_in_virtual_time(main())


def test_a_finished_request_logs_one_line_with_all_facts(written):
    asked(prompt(stream=True), traceparent=TRACED, **{"x-baton-tenant": "t1"})

    (line,) = lines(written)
    assert line["message"] == "request"
    assert (line["status"], line["tenant"], line["model"], line["trace_id"]) == (200, "t1", "m", TRACE)
    assert {"p1", "d1"} & {line.get("prefill_worker"), line["decode_worker"]}
    known = {"request_id", "decision_id", "mode", "prompt_tokens", "completion_tokens", "ttft_s", "e2e_s"}
    assert known <= line.keys()
    assert "hello" not in written.getvalue(), "nothing of a prompt is in a log"


def test_a_failed_request_logs_one_line_with_the_reason(written):
    asked(prompt(model="nobody\n{}"), traceparent=TRACED)

    (line,) = lines(written)
    assert (line["status"], line["reason"], line["model"]) == (404, "model_unknown", "nobody\n{}")
    assert line["trace_id"] == TRACE


def test_a_request_rejected_at_the_edge_logs_one_line(written):
    asked(prompt(), traceparent=TRACED, **{"content-length": str(1 << 40)})

    (line,) = lines(written)
    assert (line["status"], line["reason"], line["path"], line["trace_id"]) == (413, "too_large", COMPLETIONS, TRACE)
    assert line["request_id"]


def test_a_request_that_names_no_model_is_logged_under_the_one_that_served_it(written):
    body = prompt(stream=True)
    del body["model"]

    asked(body)

    assert [line["model"] for line in lines(written)] == ["m"]
