"""A host that runs from its units alone, and the upgrade of its workers under requests."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

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
    """The units of a host with two workers, written by `baton service install`."""

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

    def pids(self) -> list[str]:
        return [(self.units / f"baton-worker@{each}.service.pid").read_text() for each in WORKERS]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    installed = Installed(tmp_path)
    for file in (installed.state / "services").glob("*.env"):  # The package may be installed from another checkout.
        file.write_text(f'{file.read_text()}PYTHONPATH="{ROOT}"\n')
    try:
        unit_manager.start_target(installed.units)
        yield installed
    finally:
        unit_manager.stop_target(installed.units)
        installed.http.close()


def test_units_serve_and_an_upgrade_restarts_workers_in_turn_without_a_failed_request(host: Installed, tmp_path: Path):
    ready = dict.fromkeys(WORKERS, "ready")
    until(lambda: host.phases() == ready, "both workers are ready", START_S_MAX)
    until(lambda: host.answered() == 200, "a request is served")
    before, statuses, ended = host.pids(), list[int](), threading.Event()

    def ask() -> None:
        while not ended.wait(PAUSE_S):
            statuses.append(host.answered())

    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.unit_manager "$@"\n')
    systemctl.chmod(0o755)
    client = threading.Thread(target=ask)
    client.start()
    try:
        path = f"{systemctl.parent}:{os.environ['PATH']}"
        code, out, err = baton(
            "service",
            "upgrade",
            "--state-dir",
            str(host.state),
            env={"PATH": path, "UNIT_FOLDER": str(host.units)},
            s_max=UPGRADE_S_MAX,
        )
    finally:
        ended.set()
        client.join()

    assert code == 0, out + err
    assert [line for line in out.splitlines() if line.endswith("is ready.")] == [
        f"{each} is ready." for each in WORKERS
    ]
    assert not set(before) & set(host.pids())
    assert set(statuses) == {200}, statuses
    assert host.phases() == ready
