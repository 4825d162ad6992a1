"""The README's walkthrough for two hosts, command by command, in two network namespaces with empty home folders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.network_hosts import COMMAND_S_MAX, Host, two_hosts
from tests.support.processes import ROOT
from tests.support.system import STOP_S_MAX, until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]

ENGINES_START_S_MAX = 900.0
LOST_S_MAX = 60.0
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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path, {**FAST, **OVER_TCP}) as both:
        yield both


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


SPANNING = """
[[host]]
name = "one"
address = "10.0.0.1"
cores = [0, 1]
workers = [{ role = "prefill" }, { role = "decode", pipeline = 2, hosts = ["two"] }]

[[host]]
name = "two"
cores = [1]
"""
ON_BOTH = ["one-prefill-1", "one-decode-1"]


@pytest.mark.vllm
@pytest.mark.timeout(2400)
def test_an_engine_over_both_hosts_ends_with_the_link_and_comes_back_by_itself(hosts: tuple[Host, Host]):
    """With vLLM: the first stage of the decode engine is on one host, and the second one on the other."""
    one, two = hosts
    readme = page()
    (one.folder / "fleet.toml").write_text(SPANNING)

    with one.running(readme.up):
        one.wait_said("one-prefill-1  ready", ENGINES_START_S_MAX)
        one.run(readme.token)
        (two.folder / "two.token").write_text((one.folder / "two.token").read_text())
        with two.running(readme.join):
            two.wait_said("two-decode-1 joined", ENGINES_START_S_MAX)
            one.wait_said("Baton is ready", ENGINES_START_S_MAX)
            [key] = re.findall(r"shown only once:\n(\S+)", one.said())
            until(lambda: served_by(one, key) == ON_BOTH, "a request uses both hosts")

            two.set_link("down")
            until(lambda: workers(one).get("one-decode-1") != "ready", "the engine is lost", LOST_S_MAX)
            two.set_link("up")
            until(lambda: workers(one).get("one-decode-1") == "ready", "the engine is back", ENGINES_START_S_MAX)
            until(lambda: served_by(one, key) == ON_BOTH, "a request uses both hosts again", LOST_S_MAX)
            assert json.loads(one.run(f"{BATON} doctor --json"))["errors"] == 0
