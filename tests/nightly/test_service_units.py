"""A host that runs from its unit alone, and the upgrade of its workers under requests."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.launcher.system.rolling_restart import running_processes
from tests.e2e.conftest import FAST
from tests.support import unit_manager
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.system import baton, until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]

START_S_MAX = 120.0
UPGRADE_S_MAX = 400.0
"""For two workers to drain and to start, on a busy machine."""
PAUSE_S = 0.1
"""Between two requests of the client, so that workers have time to start."""
WORKERS = ("one-both-1", "one-both-2")


class Installed:
    """The unit of a host with two workers, written by `baton service install`."""

    def __init__(self, folder: Path) -> None:
        self.units, self.state = folder / "units", folder / "state"
        self.port, self.nats = free_port(), free_port()
        self.file = folder / "fleet.toml"
        self.file.write_text(
            f"""engine = "simulated"
nats = {{ port = {self.nats} }}
router = {{ port = {self.port} }}
collector = {{ port = {free_port()} }}
[env]
"""
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in FAST.items())
            + '[[host]]\nname = "one"\nworkers = [{ role = "both", count = 2 }]\n'
        )
        code, out, err = baton(
            "service", "install", "--config", str(self.file), "--name", "one", "--out", str(self.units),
            "--state-dir", str(self.state), env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert code == 0, out + err
        [key] = re.findall(r"shown only once:\n(\S+)", err)
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=60.0, trust_env=False
        )

    def answered(self) -> int:
        body = {"model": "baton-tiny", "prompt": "Once upon a time", "max_tokens": 20}
        try:
            return self.http.post("/v1/completions", json=body).status_code
        except httpx.TransportError:
            return 0

    def phases(self) -> dict[str, str]:
        code, out, _err = baton(
            "workers", "--json", "--nats-url", f"tls://127.0.0.1:{self.nats}", "--state-dir", str(self.state)
        )
        found = json.loads(out)["workers"] if code == 0 else []
        return {each["record"]["worker_id"]: each["phase"] for each in found}

    def pids(self) -> set[int]:
        return {each.process.pid for each in running_processes(str(self.state)) if each.name in WORKERS}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Installed]:
    installed = Installed(tmp_path)
    variables = installed.state / "service.env"  # The package may be installed from another checkout.
    variables.write_text(f'{variables.read_text()}PYTHONPATH="{ROOT}"\n')
    process = unit_manager.start(installed.units / "baton.service")
    try:
        yield installed
    finally:
        left = unit_manager.stop(process)
        installed.http.close()
    assert (process.returncode, left) == (0, [])


def test_a_unit_serves_and_an_upgrade_restarts_processes_in_turn_without_a_failed_request(host: Installed):
    ready = dict.fromkeys(WORKERS, "ready")
    until(lambda: host.phases() == ready, "both workers are ready", START_S_MAX)
    until(lambda: host.answered() == 200, "a request is served")
    before, statuses, ended = host.pids(), list[int](), threading.Event()

    def ask() -> None:
        while not ended.wait(PAUSE_S):
            statuses.append(host.answered())

    client = threading.Thread(target=ask)
    client.start()
    try:
        workers = baton("service", "upgrade", "--state-dir", str(host.state), s_max=UPGRADE_S_MAX)
        others = baton(
            "service", "upgrade", "orchestrator", "collector", "--state-dir", str(host.state), s_max=UPGRADE_S_MAX
        )
    finally:
        ended.set()
        client.join()

    assert (workers[0], others[0]) == (0, 0), (workers, others)
    assert restarted(workers[1]) == list(WORKERS)
    assert restarted(others[1]) == ["orchestrator", "collector"]
    assert len(host.pids() - before) == len(WORKERS)
    assert set(statuses) == {200}, statuses
    assert host.phases() == ready


def restarted(output: str) -> list[str]:
    return re.findall(r"(\S+) is ready", output)


def test_a_process_that_does_not_run_is_named(host: Installed):
    until(lambda: len(host.pids()) == len(WORKERS), "both workers run", START_S_MAX)

    code, out, err = baton("service", "upgrade", "nobody", "--state-dir", str(host.state))

    assert code == 1
    assert "No nobody runs" in out + err
