"""`baton up --routers 2`: two routers behind one address, each also at a port of its own; one may die. The system has every
kind of process that a host can have.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from services.launcher.system import state_file
from services.launcher.system.process_plan import Stage
from services.launcher.system.watchdog import STILL_S_MAX
from tests.e2e.conftest import START_S_MAX
from tests.e2e.test_disaggregation import listens_on_loopback_alone
from tests.support.nats_server import is_free
from tests.support.system import GUARD_S_MAX, System, baton, until

pytestmark = pytest.mark.nats

TWO = ("--engine", "simulated", "--routers", "2", "--both", "1")
ALL_KINDS = ("--store", "1", "--workers-max", "2")
OVER_TCP = {"WORKER_SIMULATED": "transfer=tcp"}
NAMES = ("router-1", "router-2")
CONNECTIONS_MAX = 200
BEAT_S_MAX = 1.5
"""Of the launcher, whose supervisor allows it 2 s."""
SPARE_S = 10.0
"""For heartbeats that were under way when a process was frozen, and for a busy machine."""


@pytest.fixture(scope="module")
def notified() -> Iterator[socket.socket]:
    """Where the launcher's own supervisor, such as systemd, gets heartbeats."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind("")
        yield notified


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, notified: socket.socket) -> Iterator[System]:
    asked = {"NOTIFY_SOCKET": f"@{notified.getsockname()[1:].decode()}", "WATCHDOG_USEC": "2000000"}
    with System(tmp_path_factory.mktemp("routers"), *TWO, *ALL_KINDS, env={**asked, **OVER_TCP}) as system:
        yield system.wait_ready(START_S_MAX)


def own_urls(system: System) -> dict[str, str]:
    running = state_file.find(system.folder)
    assert running is not None
    return running.routers


def complete(system: System) -> httpx.Response:
    """Over a connection of its own, so that the kernel chooses a router."""
    body = {"model": "baton-tiny", "prompt": "Who answers?", "max_tokens": 2}
    return httpx.post(f"{system.endpoint}/v1/completions", json=body, timeout=30.0, trust_env=False)


def served(system: System) -> dict[str, float]:
    """Requests that each router has answered."""
    return {
        name: sum_of(httpx.get(f"{url}/metrics", trust_env=False).text, "baton_router_requests_total")
        for name, url in own_urls(system).items()
    }


def sum_of(metrics: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name))


def test_a_system_of_all_kinds_listens_on_loopback_alone(system: System):
    listens_on_loopback_alone(system)


def test_both_routers_answer_at_the_one_address(system: System):
    assert tuple(own_urls(system)) == NAMES
    for _ in range(CONNECTIONS_MAX):
        assert complete(system).status_code == 200
        if all(served(system).values()):
            return
    pytest.fail(f"one router got everything: {served(system)}")


def test_both_routers_are_listed_with_their_own_addresses(system: System):
    _code, listed, _err = baton("workers", "--state-dir", str(system.folder))

    for name, url in own_urls(system).items():
        assert f"{name} {url}" in system.said()
        assert f"{name} {url}" in listed
        assert baton("health", "router", name, "--state-dir", str(system.folder))[0] == 0


def test_the_launcher_sends_its_supervisor_heartbeats_while_its_loop_runs(system: System, notified: socket.socket):
    assert system.process is not None
    drain(notified)
    notified.settimeout(SPARE_S)
    assert notified.recv(100) == b"WATCHDOG=1"

    launcher = psutil.Process(system.process.pid)
    launcher.suspend()
    try:
        drain(notified)
        notified.settimeout(BEAT_S_MAX)
        with pytest.raises(TimeoutError):
            notified.recv(100)
    finally:
        launcher.resume()
    notified.settimeout(SPARE_S)
    assert notified.recv(100) == b"WATCHDOG=1"


def drain(received: socket.socket) -> None:
    received.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while received.recv(100):
            pass


def test_a_second_system_is_refused_the_shared_port(system: System, tmp_path: Path):
    code, out, err = baton("up", *TWO, "--port", str(system.port), "--state-dir", str(tmp_path))

    assert code == 1
    assert f"Port {system.port}" in out + err
    assert not list((tmp_path / "logs").glob("*.log"))


def test_when_a_router_is_killed_the_other_answers_until_it_is_back(system: System):
    victim, process = own_urls(system)["router-1"], router_process(system, "router-1")

    process.kill()
    psutil.wait_procs([process], GUARD_S_MAX)

    for _ in range(10):
        assert complete(system).status_code == 200
    until(lambda: answers(f"{victim}/ready"), "the killed router is back at its own address")


def test_a_router_that_is_frozen_is_killed_so_that_the_other_gets_its_connections(system: System):
    victim, process = own_urls(system)["router-1"], router_process(system, "router-1")
    until(lambda: answers(f"{victim}/ready"), "it serves")

    process.suspend()
    gone, _ = psutil.wait_procs([process], STILL_S_MAX[Stage.SERVICES] + SPARE_S)

    assert gone == [process]
    for _ in range(10):
        assert complete(system).status_code == 200
    assert "router-1: It was stopped (SIGSTOP, or a debugger) for 10 s, so it was killed." in system.said()
    until(lambda: answers(f"{victim}/ready"), "it is back at its own address")


def router_process(system: System, name: str) -> psutil.Process:
    processes = map(psutil.Process, system.pids("services.router"))
    [found] = [each for each in processes if each.environ()["ROUTER_INSTANCE"] == name]
    return found


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_down_leaves_nothing(system: System):
    """The last of them: it uses the system up."""
    ports = [
        system.port,
        system.collector_port,
        system.nats_port,
        *(int(url.rsplit(":", 1)[1]) for url in own_urls(system).values()),
    ]

    code, out, _err = baton("down", "--state-dir", str(system.folder))

    assert code == 0
    assert system.endpoint in out
    until(lambda: not system.processes(), "no process is left", GUARD_S_MAX)
    assert all(is_free(port) for port in ports)
