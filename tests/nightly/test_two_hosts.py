"""The README's walkthrough for two hosts, command by command, in two network namespaces with empty home folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import ROOT
from tests.support.system import STOP_S_MAX, end_with_the_tests, environment, until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]

START_S_MAX = 120.0
ENGINES_START_S_MAX = 900.0
LOST_S_MAX = 60.0
COMMAND_S_MAX = 60.0
ADDRESS, OTHER = "10.0.0.1", "10.0.0.2"
BATON = ".venv/bin/baton"
FAST = {"WORKER_SIMULATED": "prefill_base_s=0,decode_base_s=0.002"}
OVER_TCP = {"UCX_TLS": "tcp,self"}
"""Namespaces of one machine share memory, unlike two machines: KV would go that way."""
ASK = """
import json, sys, urllib.request
body = {"model": "baton-tiny", "prompt": "Once upon a time " * 200, "max_tokens": 8}
headers = {"authorization": "Bearer " + sys.argv[1], "content-type": "application/json", "x-baton-mode": "disaggregated"}
asked = urllib.request.Request("http://10.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(asked, timeout=20) as answer:
    assert json.load(answer)["choices"][0]["text"]
    print(answer.headers.get("x-baton-prefill-worker"), answer.headers["x-baton-decode-worker"])
"""
KV_BYTES_MIN = 1_000_000
"""Of that prompt, which has 2 MB. NATS's messages for a request have some kB."""


@dataclass
class Host:
    """A network namespace, a home folder, and the folder in which a person types."""

    namespace: str
    device: str
    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "home").mkdir(parents=True)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")  # This is what `make setup` leaves.
        self.log = self.folder / "log"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in environment().items() if not name.startswith("XDG_")}
        return {**kept, **FAST, **OVER_TCP, "HOME": str(self.folder / "home"), "COLUMNS": "80"}

    def arguments(self, line: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *shlex.split(line, comments=True)]

    def run(self, line: str) -> str:
        """A command of the page, to its end."""
        line, _, target = line.partition(" > ")
        done = subprocess.run(
            self.arguments(line), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if target:
            (self.folder / target).write_text(done.stdout)
        return done.stdout

    @contextmanager
    def running(self, line: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command of the page that runs until Ctrl-C; nothing of it is left afterwards."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.arguments(line),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_the_tests,  # noqa: PLW1509  # one system call between fork and exec
            )
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S_MAX)
            finally:
                for each in [each for each in family if each.is_running()]:
                    each.kill()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_said(self, text: str, s_max: float = START_S_MAX) -> None:
        try:
            until(lambda: text in self.said(), f"{self.namespace} says {text!r}", s_max)
        except AssertionError as error:
            logs = (self.folder / "home").rglob("*.log")
            raise AssertionError(
                "\n".join([str(error), self.said(), *(f"--- {log}\n{log.read_text()[-2000:]}" for log in logs)])
            ) from error

    def link_bytes(self) -> int:
        """What has come over the cable."""
        shown = subprocess.run(
            ["ip", "-n", self.namespace, "-json", "-stats", "link", "show", self.device],
            capture_output=True, check=True, timeout=COMMAND_S_MAX,
        )  # fmt: skip
        received: int = json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"]
        return received

    def set_link(self, state: str) -> None:
        command("ip", "-n", self.namespace, "link", "set", self.device, state)


def command(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, timeout=COMMAND_S_MAX)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a cable between them."""
    one, two = (f"baton-{os.getpid()}-{number}" for number in (1, 2))
    devices = [f"b{os.getpid()}-{number}" for number in (1, 2)]
    with ExitStack() as cleanup:
        for namespace in (one, two):
            try:
                command("ip", "netns", "add", namespace)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"network namespaces cannot be made here: {error}")
            cleanup.callback(command, "ip", "netns", "del", namespace)
        command("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for namespace, device, address in zip((one, two), devices, (ADDRESS, OTHER), strict=True):
            command("ip", "link", "set", device, "netns", namespace)
            command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            command("ip", "-n", namespace, "link", "set", device, "up")
            command("ip", "-n", namespace, "link", "set", "lo", "up")
        yield Host(one, devices[0], tmp_path / "one"), Host(two, devices[1], tmp_path / "two")


@dataclass(frozen=True)
class Page:
    """What the README tells a person to write and to type."""

    fleet: str
    up: str
    token: str
    join: str


def page() -> Page:
    section = (ROOT / "README.md").read_text().partition("## Quick start on two hosts")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    lines = [line for kind, text in blocks if kind == "sh" for line in text.strip().splitlines()]
    [fleet] = [text for kind, text in blocks if kind == "toml"]
    return Page(fleet, *lines)


def workers(head: Host) -> dict[str, str]:
    """Phase by worker id, as the page's last command has them."""
    rows: list[dict[str, Any]] = json.loads(head.run(f"{BATON} workers --json"))["workers"]
    return {row["record"]["worker_id"]: row["phase"] for row in rows}


def served_by(head: Host, key: str) -> list[str]:
    """The workers whose engines computed the prompt and the answer of a request; empty if it failed."""
    asked = subprocess.run(
        ["ip", "netns", "exec", head.namespace, sys.executable, "-c", ASK, key],
        capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
    )  # fmt: skip
    return asked.stdout.split()


BOTH = ["one-prefill-1", "two-decode-1"]


def test_the_readme_joins_two_hosts_and_a_broken_link_between_them_heals(hosts: tuple[Host, Host]):
    one, two = hosts
    readme = page()
    (one.folder / "fleet.toml").write_text(f'engine = "simulated"\n{readme.fleet}')

    with one.running(readme.up):
        one.wait_said("one-prefill-1  ready")
        one.run(readme.token)
        (two.folder / "two.token").write_text((one.folder / "two.token").read_text())
        with two.running(readme.join) as joined:
            two.wait_said("two-decode-1 joined")
            one.wait_said("Baton is ready")
            [key] = re.findall(r"shown only once:\n(\S+)", one.said())
            until(lambda: served_by(one, key) == BOTH, "a request uses both hosts")
            assert workers(one) == {"one-prefill-1": "ready", "two-decode-1": "ready"}

            two.set_link("down")
            until(lambda: workers(one).get("two-decode-1") != "ready", "the worker is lost", LOST_S_MAX)
            assert "two-decode-1" not in served_by(one, key)
            two.set_link("up")
            until(lambda: workers(one).get("two-decode-1") == "ready", "the worker is back", LOST_S_MAX)
            until(lambda: served_by(one, key) == BOTH, "a request uses both hosts again")
            assert joined.poll() is None
        until(lambda: "two-decode-1" not in workers(one), "the worker has left")

        with two.running(f"{BATON} join") as again:
            two.wait_said("two-decode-1 joined")
            one.run(f"{BATON} drain two-decode-1")
            assert again.wait(STOP_S_MAX) == 0, two.said()
        with two.running(f"{BATON} join"):
            two.wait_said("two-decode-1 joined")
            one.run(f"{BATON} token --name two --revoke")
            until(lambda: workers(one).get("two-decode-1") != "ready", "NATS ends its connections", LOST_S_MAX)
        with two.running(f"{BATON} join") as refused:
            assert refused.wait(STOP_S_MAX) == 1
        assert "does not know the key" in two.said(), two.said()


@pytest.mark.vllm
@pytest.mark.timeout(2400)
def test_the_readme_as_it_is_moves_kv_between_two_hosts(hosts: tuple[Host, Host]):
    """With vLLM, and the prompt's KV from one namespace to the other over TCP."""
    one, two = hosts
    readme = page()
    (one.folder / "fleet.toml").write_text(readme.fleet)

    with one.running(readme.up):
        one.wait_said("one-prefill-1  ready", ENGINES_START_S_MAX)
        one.run(readme.token)
        (two.folder / "two.token").write_text((one.folder / "two.token").read_text())
        with two.running(readme.join):
            two.wait_said("two-decode-1 joined", ENGINES_START_S_MAX)
            one.wait_said("Baton is ready")
            [key] = re.findall(r"shown only once:\n(\S+)", one.said())
            before = two.link_bytes()
            until(lambda: served_by(one, key) == BOTH, "a request uses both hosts")
            assert two.link_bytes() - before >= KV_BYTES_MIN
