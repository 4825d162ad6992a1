"""`baton up --keep-trying`: a host serves with the workers that start, whatever keeps others from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.nats_server import free_port
from tests.support.system import Launched

pytestmark = pytest.mark.nats


def test_a_host_that_keeps_trying_serves_with_the_workers_that_start(tmp_path: Path):
    fleet = tmp_path / "fleet.toml"
    nats_port, port, collector_port = free_port(), free_port(), free_port()
    fleet.write_text(f"""
engine = "simulated"
nats = {{ port = {nats_port} }}
router = {{ port = {port} }}
collector = {{ port = {collector_port} }}
model = [{{ name = "baton-tiny" }}, {{ name = "without-a-tokenizer" }}]
[[host]]
name = "one"
address = "127.0.0.1"
workers = [{{ role = "both", model = "without-a-tokenizer", count = 2 }}, {{ role = "both", model = "baton-tiny" }}]
""")
    arguments = ("--config", str(fleet), "--name", "one", "--keep-trying")

    with Launched(tmp_path / "state", *arguments, env={"HF_HUB_OFFLINE": "1"}) as host:
        host.wait_said("Baton is ready", START_S_MAX)
        assert "needs the tokenizer of without-a-tokenizer" in host.said()
