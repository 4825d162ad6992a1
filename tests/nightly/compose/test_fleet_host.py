"""A host of a fleet in one container, as `baton service install --kind compose` writes it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SPEEDS
from tests.nightly.compose.conftest import READY_S_MAX, UP_S_MAX, Compose, running
from tests.support.nats_server import free_port
from tests.support.system import baton, until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

FLEET = """
engine = "simulated"
nats = {{ port = {nats} }}
router = {{ port = {router} }}
collector = {{ port = {collector} }}
env = {{ WORKER_SIMULATED = "{speeds}" }}
[[host]]
name = "one"
address = "127.0.0.1"
workers = [{{ role = "prefill" }}, {{ role = "decode" }}]
"""
SLOW = f"{SPEEDS},decode_base_s=0.01"
"""So that a stream takes longer than the signal, and less than a drain."""
TOKENS = 1000
REQUEST_S_MAX = 60.0
WORKERS = {"one-prefill-1", "one-decode-1"}


class Host:
    """The container of a fleet file's only host, and a client with its first API key."""

    def __init__(self, compose: Compose, folder: Path) -> None:
        self.compose, self.state, self.nats = compose, folder / "state", free_port()
        router, fleet = free_port(), folder / "fleet.toml"
        fleet.write_text(FLEET.format(nats=self.nats, router=router, collector=free_port(), speeds=SLOW))
        code, out, err = baton(
            "service", "install", "--kind", "compose", "--image", "baton-light:test", "--config", str(fleet),
            "--name", "one", "--state-dir", str(self.state), "--out", str(folder), env={"HF_HOME": str(folder / "models")},
        )  # fmt: skip
        assert code == 0, out + err
        [key] = re.findall(r"shown only once:\n(\S+)", err)
        self.file = str(folder / "baton.compose.yaml")
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{router}",
            headers={"authorization": f"Bearer {key}"},
            timeout=REQUEST_S_MAX,
            trust_env=False,
        )

    def run(self, *arguments: str) -> str:
        return self.compose.run("-f", self.file, *arguments)

    def ready(self) -> set[str]:
        """Workers that commands on the host see."""
        url = f"tls://127.0.0.1:{self.nats}"
        code, out, _err = baton("workers", "--json", "--nats-url", url, "--state-dir", str(self.state))
        found = json.loads(out)["workers"] if code == 0 else []
        return {each["record"]["worker_id"] for each in found if each["phase"] == "ready"}

    def stream(self, begun: threading.Event) -> list[str]:
        """Events of an answer."""
        body = {
            "model": "baton-tiny", "prompt": "Once upon a time", "max_tokens": TOKENS, "stream": True, "ignore_eos": True
        }  # fmt: skip
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            first = next(lines)
            begun.set()
            return [line for line in (first, *lines) if line.startswith("data: ")]


@pytest.fixture
def host(docker: dict[str, str], tmp_path: Path) -> Iterator[Host]:
    with running(docker, "simulated") as compose:
        compose.run("build", "init", timeout=UP_S_MAX)
        host = Host(compose, tmp_path)
        try:
            host.run("up", "--detach")
            yield host
        finally:
            print(host.run("logs", "--no-color", "--tail", "40"))
            host.run("down", "--timeout", "20")
            host.http.close()


def test_a_host_in_a_container_serves_upgrades_its_workers_and_drains(host: Host):
    until(lambda: host.ready() == WORKERS, "both workers are ready", READY_S_MAX)

    upgraded = host.compose.docker("exec", "baton", "baton", "service", "upgrade", "--state-dir", str(host.state))
    assert set(re.findall(r"(\S+) is ready", upgraded)) == WORKERS
    until(lambda: host.ready() == WORKERS, "both workers are ready again", READY_S_MAX)

    events, begun = list[str](), threading.Event()
    client = threading.Thread(target=lambda: events.extend(host.stream(begun)))
    client.start()
    assert begun.wait(REQUEST_S_MAX)
    host.run("stop")
    client.join()

    assert (events[-1], len(events)) == ("data: [DONE]", TOKENS + 1)
    ended = host.compose.docker("inspect", "--format", "{{.State.ExitCode}} {{.RestartCount}}", "baton")
    assert ended.split() == ["0", "0"]
