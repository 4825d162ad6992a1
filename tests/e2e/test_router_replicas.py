"""`baton up --routers 2`: two routers behind one address, each also at a port of its own; one may die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from services.launcher.system import state_file
from tests.e2e.conftest import START_S_MAX
from tests.support.nats_server import is_free
from tests.support.system import GUARD_S_MAX, System, baton, until

pytestmark = pytest.mark.nats

TWO = ("--engine", "simulated", "--routers", "2", "--both", "2")
NAMES = ("router-1", "router-2")
CONNECTIONS_MAX = 200


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("routers"), *TWO) as system:
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


def test_a_second_system_is_refused_the_shared_port(system: System, tmp_path: Path):
    code, out, err = baton("up", *TWO, "--port", str(system.port), "--state-dir", str(tmp_path))

    assert code == 1
    assert f"Port {system.port}" in out + err
    assert not list((tmp_path / "logs").glob("*.log"))


def test_when_a_router_is_killed_the_other_answers_until_it_is_back(system: System):
    victim = own_urls(system)["router-1"]
    [pid] = [
        process
        for process in system.pids("services.router")
        if psutil.Process(process).environ()["ROUTER_INSTANCE"] == "router-1"
    ]

    psutil.Process(pid).kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], GUARD_S_MAX)

    for _ in range(10):
        assert complete(system).status_code == 200
    until(lambda: answers(f"{victim}/ready"), "the killed router is back at its own address")


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_down_leaves_nothing(system: System):
    """The last of them: it uses the system up."""
    ports = [system.port, *(int(url.rsplit(":", 1)[1]) for url in own_urls(system).values())]

    code, out, _err = baton("down", "--state-dir", str(system.folder))

    assert code == 0
    assert system.endpoint in out
    until(lambda: not system.processes(), "no process is left", GUARD_S_MAX)
    assert all(is_free(port) for port in ports)
