"""A whole service process: signals, exit codes, a NATS that is not there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.nats_server import free_port

EXIT_S_MAX = 30.0
"""Half a minute less than who "slow" waits, and than OpenTelemetry tries to reach a receiver."""

PROGRAM = """
import asyncio, sys
from shared.contracts.control import ServicePhase
from shared.runtime.service import LastResorts, run_service
from shared.runtime.settings import load_common

async def deaf():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def main(service):
    if "deaf-task" in sys.argv:
        service.tasks.create_task(deaf())
    if "deaf-stray" in sys.argv:
        service.stray = asyncio.get_running_loop().create_task(deaf())
    await asyncio.sleep(0)
    service.set_phase(ServicePhase.READY)
    await service.stopping.wait()
    if "slow" in sys.argv:
        await asyncio.sleep(60)
    if "deaf-main" in sys.argv:
        await deaf()

run_service("router", "r1", load_common(), main, drain_s_max=30.0 if "patient" in sys.argv else 0.2,
    last_resorts=LastResorts(cancel_s_max=0.3, ending_s_max=2.0))
"""


class Process:
    def __init__(self, *arguments: str, **variables: str) -> None:
        environ = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], env=environ, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"never said {text!r}: {self.lines}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        try:
            _, rest = self._process.communicate(timeout=EXIT_S_MAX)
            self.lines += rest.splitlines()
        finally:
            self._process.kill()
        return self._process.returncode


@pytest.mark.nats
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_service_with_exit_code_0(nats_server, number):
    process = Process(BATON_NATS_URL=nats_server.url)
    process.wait_for("ready")

    process.signal(number)

    assert process.exit_code() == 0


@pytest.mark.nats
def test_a_second_signal_ends_it_at_once(nats_server):
    process = Process("slow", "patient", BATON_NATS_URL=nats_server.url)
    process.wait_for("ready")

    process.signal(signal.SIGTERM)
    process.wait_for("stopping")
    process.signal(signal.SIGTERM)

    assert process.exit_code() == 1


@pytest.mark.nats
def test_a_drain_beyond_its_deadline_exits_1_with_a_dead_otlp_receiver(nats_server):
    process = Process("slow", BATON_NATS_URL=nats_server.url, BATON_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    process.wait_for("ready")

    process.signal(signal.SIGTERM)

    assert process.exit_code() == 1


@pytest.mark.nats
@pytest.mark.parametrize(("who", "code"), [("deaf-task", 1), ("deaf-stray", 0), ("deaf-main", 1)])
def test_a_task_that_ignores_its_cancellation_cannot_keep_the_process_alive(nats_server, who, code):
    process = Process(who, BATON_NATS_URL=nats_server.url)
    process.wait_for("ready")

    process.signal(signal.SIGTERM)

    assert process.exit_code() == code


def test_a_service_that_finds_no_nats_can_still_be_stopped():
    process = Process(BATON_NATS_URL=f"nats://127.0.0.1:{free_port()}", BATON_LOG_LEVEL="debug")
    process.wait_for("NATS")

    process.signal(signal.SIGTERM)

    assert process.exit_code() == 0
