"""The disk of a whole system is full: state directory, logs and JetStream's store. Running processes keep serving."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.contracts.workers import WORKER_RECORD_TTL_S
from tests.e2e.conftest import FAST, START_S_MAX
from tests.support.system import System, until

pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system that it can fill"),
]

DISK_BYTES = 384 * 1024 * 1024
WORKERS = {"prefill-1", "prefill-2", "decode-1", "decode-2"}
FULL_S = 2 * WORKER_RECORD_TTL_S
"""Longer than every lifetime in the registry."""
OFTEN = {"ORCHESTRATOR_LEASE_S": "2"}
"""So often a leader writes that files have no room for it for long in their last page."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Not one byte can be written there."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    assert shutil.disk_usage(disk).free == 0
    yield
    filler.unlink()


def ask(system: System, number: int) -> int:
    body = {"model": "baton-tiny", "prompt": [10 + number * 7 % 2000] * 400, "max_tokens": 4}
    return system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"}).status_code


def ready(system: System) -> set[str]:
    return {name for name, worker in system.fleet().items() if worker["phase"] == "ready"}


def term(system: System) -> float:
    """The leader's; 0 when nobody leads."""
    return system.fleet_metrics().sum("baton_fleet_term")


def set_mode(system: System) -> int:
    """As an operator at the console."""
    order = {"action": "mode", "mode": "auto"}
    url = f"http://127.0.0.1:{system.collector_port}/console/orders"
    return httpx.post(url, json=order, trust_env=False, timeout=60.0).status_code


def health(system: System) -> str:
    """The console's."""
    with httpx.stream("GET", f"http://127.0.0.1:{system.collector_port}/console/events", trust_env=False) as events:
        page = next(line for line in events.iter_lines() if line.startswith("data: "))
    return str(json.loads(page.removeprefix("data: "))["health"])


def test_requests_are_served_for_as_long_as_the_disk_is_full(disk: Path):
    arguments = ("--engine", "simulated", "--prefill", "2", "--decode", "2")
    with System(disk / "state", *arguments, env={**FAST, **OFTEN}) as system:
        system.wait_ready(START_S_MAX).until_exact(4)
        until(lambda: ready(system) == WORKERS and term(system), "all workers are ready, and somebody leads")
        before, led_in = {process.pid for process in system.processes()}, term(system)
        with full(disk):
            full_until = time.monotonic() + FULL_S
            while time.monotonic() < full_until:
                assert [ask(system, number) for number in range(10)] == [200] * 10
                assert (ready(system), term(system)) == (WORKERS, led_in)
            assert {process.pid for process in system.processes()} == before
            until(lambda: set_mode(system) == 503, "what needs the disk fails")
            until(lambda: "The disk of state" in health(system), "the console says why it is degraded")

            os.kill(system.worker_pid("decode-2"), signal.SIGKILL)
            until(lambda: ready(system) == WORKERS - {"decode-2"}, "the loss is noticed")
            until(lambda: ready(system) == WORKERS, "a worker that is restarted registers on the full disk")

        until(lambda: "The disk of state" not in health(system), "the console is content again")
        assert ask(system, 1) == 200
        assert term(system) == led_in
