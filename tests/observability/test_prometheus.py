"""A real Prometheus scrapes a running system, and every panel of every dashboard has something to show."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.nats_server import free_port
from tests.observability.expressions import ALERTS, alert_expressions, dashboard_expressions
from tests.processes import service_process
from tests.simulated_system import simulated_system, until_ready

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on this machine (Debian: apt-get install prometheus)"),
]

FILLED_S_MAX = 60.0
LOOK_S = 0.5
ONLY_AFTER_EVENTS = {"requests: Placed again, and resumed", "fleet: Planner's changes"}
"""Panels that are empty as long as nothing goes wrong and nothing has to be changed, which this test does not bring about."""


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


def test_every_panel_shows_something_and_no_alert_fires(tmp_path, nats_server, prometheus):
    url, targets = prometheus
    store = {"WORKER_ROLE": "store", "WORKER_WORKER_ID": "s1", "WORKER_ENGINE": "simulated"}
    where = {"BATON_NATS_URL": nats_server.url, "BATON_STATE_DIR": str(tmp_path)}
    with simulated_system(tmp_path, nats_server) as system, service_process("worker", tmp_path, **store, **where):
        for job, target in (("baton-collector", system.collector_url), ("baton-router", system.router_url)):
            (targets / f"{job}.yaml").write_text(yaml.safe_dump([{"targets": [target.removeprefix("http://")]}]))
        until_ready(f"{url}/-/ready")
        empty = {each.where: each.promql for each in dashboard_expressions() if each.where not in ONLY_AFTER_EVENTS}
        deadline = time.monotonic() + FILLED_S_MAX
        number = 0
        while empty and time.monotonic() < deadline:
            number += 1
            assert system.complete(f"Tell me story {number}. " * 20).status_code == 200
            assert b"[DONE]" in system.complete(f"Tell me story {number}. " * 20, stream=True, max_tokens=16).content
            assert system.complete("Who?", model="nobody").status_code == 404
            empty = {where: promql for where, promql in empty.items() if not ask(url, promql)}
            time.sleep(LOOK_S)

        assert not empty
        assert not [each.where for each in alert_expressions() if ask(url, each.promql)]
