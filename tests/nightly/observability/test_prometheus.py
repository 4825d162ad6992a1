"""A real Prometheus scrapes a running system; every panel and alert expression returns data."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.nats_server import free_port
from tests.support.processes import service_process
from tests.support.simulated_system import SimulatedSystem, simulated_system, until_ready
from tests.unit.observability.expressions import ALERTS, Expression, alert_expressions, dashboard_expressions, operands

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on this machine (Debian: apt-get install prometheus)"),
]

FILLED_S_MAX = 180.0
POLL_S = 0.5
LONG_TOKENS = 4000
"""Long enough that the stream still runs when its worker is killed."""
CLIENTS = 6
"""Concurrent clients: more than the prefill worker can start soon, so requests queue."""
TARGETS = '{"default": {"ttft_s": 60, "itl_s": 60}}'
MAY_FIRE = {"WorkerLost", "RequestsRefused"}
"""The test kills a worker. On a slow machine the bursts are refused for long enough to fire RequestsRefused, too."""
ROUNDS_PER_BURST = 8
"""Rounds between bursts. Bursts repeat because Prometheus sees no increase in counts before its first scrape."""
WITHOUT_DATA = {
    "fleet: Planner changes/s": "the planner has nothing to change",
    "tenants: Budget used": "no key has a budget",
    "alert ErrorRatioHigh": "no request gets a 5xx: requests of the lost worker continue on others",
    "alert ModelWithoutWorker": "no model loses its last worker",
    "alert RequestsNotReported": "the test is shorter than the time with which it compares",
    "alert ProcessFailed": "no process fails with an error",
    "alert KvReadsSlow": "simulated blocks are too small to measure the speed of reads",
}
"""Expressions without data in this test, and the reason."""


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Prometheus' URL, and the directory from which it reads its targets (one file per job)."""
    port = free_port()
    targets = tmp_path / "targets"
    targets.mkdir()
    config = tmp_path / "prometheus.yaml"
    jobs = [
        {"job_name": job, "file_sd_configs": [{"files": [f"{targets}/{job}.yaml"], "refresh_interval": "1s"}]}
        for job in ("baton-collector", "baton-router")
    ]
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ALERTS)],
                "scrape_configs": jobs,
            }
        )
    )
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            until_ready(f"http://127.0.0.1:{port}/-/ready")
            yield f"http://127.0.0.1:{port}", targets
        finally:
            process.kill()
            process.wait()


def ask(url: str, promql: str) -> list[dict]:
    reply = httpx.get(f"{url}/api/v1/query", params={"query": promql}, timeout=10).json()
    assert reply["status"] == "success", (promql, reply)
    data = reply["data"]
    return [{"value": data["result"]}] if data["resultType"] == "scalar" else data["result"]


def has_data(url: str, promql: str) -> bool:
    """Whether the query returns a number. Histograms without observations return NaN."""
    return any(each["value"][1] != "NaN" for each in ask(url, promql))


def firing(url: str) -> set[str]:
    """Names of the firing alerts."""
    alerts = httpx.get(f"{url}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
    return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + FILLED_S_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def all_expressions() -> list[Expression]:
    """The expressions of all panels, and the operands of all alerts."""
    alerts = [Expression(each.where, part) for each in alert_expressions() for part in operands(each.promql)]
    return [each for each in [*dashboard_expressions(), *alerts] if each.where not in WITHOUT_DATA]


def traffic(system: SimulatedSystem, number: int) -> None:
    """One request of each kind: streamed, not streamed, aggregated, invalid, and a client that disconnects."""
    headers = {"x-baton-tenant": f"tenant-{number % 2}"}
    assert system.complete(f"Tell me story {number}. " * 20, headers).status_code == 200
    assert b"[DONE]" in system.complete(f"Tell me story {number}. " * 20, stream=True, max_tokens=16).content
    assert system.complete(f"Tell me story {number} alone. " * 20, {"x-baton-mode": "aggregated"}).status_code == 200
    assert system.complete("Who?", model="nobody").status_code == 404
    with stream(system, f"Who reads {number}? " * 20) as abandoned:
        next(abandoned.iter_raw())


def burst(system: SimulatedSystem) -> None:
    """Send so many long prompts at once that one is queued and others may be refused."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        responses = clients.map(lambda each: system.complete(f"I am {each} in the burst. " * 250), range(CLIENTS))
        assert {response.status_code for response in responses} <= {200, 429}


@contextmanager
def stream(system: SimulatedSystem, prompt: str) -> Iterator[httpx.Response]:
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": LONG_TOKENS, "stream": True}
    url = f"{system.router_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60.0) as response:
        yield response


def lose_a_worker(system: SimulatedSystem) -> None:
    """Freeze a worker while it serves a stream, which is resumed on another one. Requests that are placed there, where their
    prompt is cached, before its silence is noticed are retried.
    """
    prompt = "Tell me of a worker that is killed. " * 20
    with ThreadPoolExecutor(CLIENTS) as clients, stream(system, prompt) as response:
        chunks = response.iter_raw()
        next(chunks)
        worker = system.processes[response.headers["x-baton-decode-worker"]]
        worker.process.send_signal(signal.SIGSTOP)
        waiting = [clients.submit(system.complete, prompt) for _ in range(CLIENTS)]
        for _ in zip(range(LONG_TOKENS), chunks, strict=False):
            pass
        assert {each.result().status_code for each in waiting} <= {200, 429}
    worker.kill()
    metrics = httpx.get(f"{system.router_url}/metrics", timeout=10).text
    assert "baton_router_retries_total{" in metrics
    assert "baton_router_resumes_total{" in metrics


def test_every_panel_and_alert_has_data_and_only_the_lost_worker_fires(tmp_path, nats_server, prometheus):
    url, targets = prometheus
    where = {"BATON_NATS_URL": nats_server.url, "BATON_STATE_DIR": str(tmp_path), "WORKER_ENGINE": "simulated"}
    store = {"WORKER_ROLE": "store", "WORKER_WORKER_ID": "s1", **where}
    spare = {"WORKER_ROLE": "decode", "WORKER_WORKER_ID": "d2", **where}
    with (
        service_process("worker", tmp_path, **store),
        service_process("worker", tmp_path, **spare) as d2,
        simulated_system(tmp_path, nats_server, ROUTER_TENANT_QUEUE_MAX="1", ROUTER_SLOS=TARGETS) as system,
    ):
        system.processes["d2"] = d2
        for job, target in (("baton-collector", system.collector_url), ("baton-router", system.router_url)):
            (targets / f"{job}.yaml").write_text(yaml.safe_dump([{"targets": [target.removeprefix("http://")]}]))
        until(lambda: ask(url, 'sum(baton_fleet_workers{phase="ready"}) == 4'))
        traffic(system, 0)
        lose_a_worker(system)
        empty = all_expressions()
        deadline = time.monotonic() + FILLED_S_MAX
        number = 0
        while empty and time.monotonic() < deadline:
            if number % ROUNDS_PER_BURST == 0:
                burst(system)
            number += 1
            traffic(system, number)
            empty = [each for each in empty if not has_data(url, each.promql)]
            time.sleep(POLL_S)

        assert [each.where for each in empty] == []
        until(lambda: "WorkerLost" in firing(url))
        assert firing(url) <= MAY_FIRE
