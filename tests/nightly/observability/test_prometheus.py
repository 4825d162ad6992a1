"""A real Prometheus scrapes a running system, and every panel of every dashboard has something to show."""

from __future__ import annotations

import shutil
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
from tests.unit.observability.expressions import ALERTS, Expression, alert_expressions, dashboard_expressions, measured

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on this machine (Debian: apt-get install prometheus)"),
]

FILLED_S_MAX = 180.0
LOOK_S = 0.5
LONG_TOKENS = 4000
"""Of a stream that is still running when its worker is killed."""
CLIENTS = 6
"""At a time: more than the prefill worker can begin soon."""
TARGETS = '{"default": {"ttft_s": 60, "itl_s": 60}}'
MAY_FIRE = {"WorkerLost", "RequestsRefused"}
"""A worker is killed; where that takes minutes, the crowds' refusals are told, too."""
CROWD_EVERY = 8
"""Rounds of traffic: what had been counted before Prometheus looked first is no growth."""
NOT_HERE = {
    "fleet: Planner's changes": "a planner that has nothing to change is a good one",
    "alert ErrorRatioHigh": "nobody gets a 5xx: what the lost worker served goes on elsewhere",
    "alert ProcessFailed": "no process fails by an error of its own",
}
"""Why these show nothing on a system on which this test is all that happens."""


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its URL, and the directory in which it looks for targets (a file for each job)."""
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
    answer = httpx.get(f"{url}/api/v1/query", params={"query": promql}, timeout=10).json()
    assert answer["status"] == "success", (promql, answer)
    return answer["data"]["result"]


def has_data(url: str, promql: str) -> bool:
    """Whether there is a number to be seen; NaN, of a histogram without observations, is none."""
    return any(each["value"][1] != "NaN" for each in ask(url, promql))


def firing(url: str) -> set[str]:
    """The alerts that Prometheus would tell somebody of."""
    alerts = httpx.get(f"{url}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
    return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def until(told: Callable[[], object]) -> None:
    """Until there is something to tell."""
    deadline = time.monotonic() + FILLED_S_MAX
    while not told():
        assert time.monotonic() < deadline
        time.sleep(LOOK_S)


def all_expressions() -> list[Expression]:
    """Each panel's, and what each alert looks at."""
    alerts = [Expression(each.where, part) for each in alert_expressions() for part in measured(each.promql)]
    return [each for each in [*dashboard_expressions(), *alerts] if each.where not in NOT_HERE]


def traffic(system: SimulatedSystem, number: int) -> None:
    """Something of everything: streams, whole answers, a mistake, a client that leaves."""
    headers = {"x-baton-tenant": f"tenant-{number % 2}"}
    assert system.complete(f"Tell me story {number}. " * 20, headers).status_code == 200
    assert b"[DONE]" in system.complete(f"Tell me story {number}. " * 20, stream=True, max_tokens=16).content
    assert system.complete(f"Tell me story {number} alone. " * 20, {"x-baton-mode": "aggregated"}).status_code == 200
    assert system.complete("Who?", model="nobody").status_code == 404
    with stream(system, f"Who reads {number}? " * 20) as abandoned:
        next(abandoned.iter_raw())


def crowd(system: SimulatedSystem) -> None:
    """So many long prompts at a time that one has to wait for its turn, and others may not even do that."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = clients.map(lambda each: system.complete(f"I am {each} in the crowd. " * 250), range(CLIENTS))
        assert {answer.status_code for answer in answers} <= {200, 429}


@contextmanager
def stream(system: SimulatedSystem, prompt: str) -> Iterator[httpx.Response]:
    """A long answer, and whatever its reader does."""
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": LONG_TOKENS, "stream": True}
    url = f"{system.router_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60.0) as answer:
        yield answer


def lose_a_worker(system: SimulatedSystem) -> None:
    """Kill one while it streams: its stream goes on elsewhere, and so does who asks for what it had cached."""
    prompt = "Tell me of a worker that is killed. " * 20
    with stream(system, prompt) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        system.processes[answer.headers["x-baton-decode-worker"]].kill()
        assert system.complete(prompt).status_code == 200
        for _ in zip(range(LONG_TOKENS), chunks, strict=False):
            pass


def test_every_panel_and_alert_has_data_and_a_lost_worker_is_all_that_is_told(tmp_path, nats_server, prometheus):
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
            if number % CROWD_EVERY == 0:
                crowd(system)
            number += 1
            traffic(system, number)
            empty = [each for each in empty if not has_data(url, each.promql)]
            time.sleep(LOOK_S)

        assert [each.where for each in empty] == []
        until(lambda: "WorkerLost" in firing(url))
        assert firing(url) <= MAY_FIRE
