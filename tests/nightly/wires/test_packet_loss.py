"""Two hosts with a bad cable between them: packets are lost below TCP, or all of them for a while."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nightly.wires.steady_load import PACE_HZ, steady_load
from tests.support.network_hosts import COMMAND_S_MAX, Host, two_hosts
from tests.support.system import until

pytestmark = [
    pytest.mark.nats,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("iptables") is None, reason="needs iptables, to lose packets"),
]

BATON = ".venv/bin/baton"
SETTINGS = {"WORKER_SIMULATED": "prefill_base_s=0,decode_base_s=0.002,transfer=auto", "UCX_TLS": "tcp,self"}
FLEET = """
engine = "simulated"

[[host]]
name = "one"
address = "10.0.0.1"
workers = [{ role = "prefill" }]

[[host]]
name = "two"
workers = [{ role = "decode" }]
"""
LOSS = 0.05
LOSS_S = 20.0
DOWN_S = 5.0
"""Longer than the silence after which a worker counts as lost."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path, SETTINGS) as both:
        yield both


def iptables(host: Host, *arguments: str) -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "iptables", "-w", *arguments],
        capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"iptables does not work here: {done.stderr}")
    return done.stdout


@contextmanager
def losing(host: Host) -> Iterator[None]:
    """A share of the packets that arrive at a host is lost. Asserts that some were."""
    rule = ["INPUT", "-i", host.device, "-m", "statistic", "--mode", "random", "--probability", str(LOSS), "-j", "DROP"]
    iptables(host, "-A", *rule)
    yield
    lost = re.search(r"^\s*(\d+) .* DROP ", iptables(host, "-L", "INPUT", "-n", "-v", "-x"), re.MULTILINE)
    iptables(host, "-D", *rule)
    assert lost is not None
    assert int(lost[1]) > 0


def test_no_request_fails_while_packets_are_lost_or_the_link_is_down(hosts: tuple[Host, Host]):
    one, two = hosts
    (one.folder / "fleet.toml").write_text(FLEET)
    with one.running(f"{BATON} up --config fleet.toml --name one"):
        one.wait_said("one-prefill-1  ready")
        one.run(f"{BATON} token --config fleet.toml --name two --out two.token")
        (two.folder / "two.token").write_text((one.folder / "two.token").read_text())
        with two.running(f"{BATON} join two.token"):
            two.wait_said(" joined")
            one.wait_said("Baton is ready")
            [key] = re.findall(r"shown only once:\n(\S+)", one.said())
            url, within = f"http://{one.address}:8000", one.arguments("")
            with steady_load(one.folder, url, key=key, mode="disaggregated", within=within) as load:
                load.run_well()
                with losing(one), losing(two):
                    time.sleep(LOSS_S)  # what is measured is this time
                told = load.end()
            assert len(told) > PACE_HZ * LOSS_S / 2
            assert {each.workers for each in told} == {("one-prefill-1", "two-decode-1")}

            with steady_load(one.folder, url, key=key, within=within) as load:
                load.run_well()
                two.set_link("down")
                time.sleep(DOWN_S)  # what is measured is this time
                two.set_link("up")
                load.run_well()
                until(lambda: "two-decode-1" in load.told()[-1].workers, "the worker serves again")
                load.end()
