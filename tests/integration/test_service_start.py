"""Services that start while NATS or JetStream cannot answer: they wait, say for what, and go on when it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import ServiceProcess, service_process
from tests.support.system import until

pytestmark = pytest.mark.nats


class Services:
    """A router, an orchestrator and a collector."""

    def __init__(self, processes: dict[str, ServiceProcess], router_port: int, collector_port: int) -> None:
        self.processes = processes
        self._urls = {"router": f"http://127.0.0.1:{router_port}", "collector": f"http://127.0.0.1:{collector_port}"}

    def get(self, name: str, path: str) -> httpx.Response:
        with httpx.Client(base_url=self._urls[name], trust_env=False, timeout=30) as http:
            return http.get(path)

    def said(self, name: str, words: str) -> bool:
        process = self.processes[name]
        assert process.process.poll() is None, f"{name} has ended"
        return words in process.log.read_text()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def services(tmp_path: Path, nats: NatsServer) -> Iterator[Services]:
    ports = free_port(), free_port()
    settings = {
        "BATON_NATS_URL": nats.url,
        "BATON_STATE_DIR": str(tmp_path / "state"),
        "ROUTER_PORT": str(ports[0]),
        "COLLECTOR_PORT": str(ports[1]),
    }
    with ExitStack() as stack:
        names = ("router", "orchestrator", "collector")
        yield Services(
            {name: stack.enter_context(service_process(name, tmp_path, **settings)) for name in names}, *ports
        )


def test_services_wait_for_nats_then_for_jetstream_say_so_and_go_on(services: Services, nats: NatsServer):
    for name in services.processes:
        until(lambda name=name: services.said(name, "waits for NATS"), f"{name} waits for NATS")
    health = services.get("router", "/health")
    assert (health.status_code, health.json()["status"], health.json()["reason"]) == (
        503,
        "unhealthy",
        "waits for NATS",
    )
    assert services.get("router", "/v1/chat/completions").json()["error"]["code"] == "bus_down"

    nats.set_jetstream(enabled=False)
    nats.start()
    for name in ("router", "orchestrator"):
        until(lambda name=name: services.said(name, "waits for JetStream (worker registry)"), f"{name} waits")
    until(lambda: services.said("collector", "ready"), "the collector needs no JetStream")
    health = services.get("router", "/health")
    assert (health.status_code, health.json()["reason"]) == (503, "waits for JetStream (worker registry)")
    assert services.get("router", "/ready").json()["reason"] == "waits for JetStream (worker registry)"
    assert services.get("router", "/v1/models").json()["data"] == []

    nats.kill()
    nats.set_jetstream(enabled=True)
    nats.start()
    until(lambda: services.get("router", "/health").status_code == 200, "the router has found JetStream")
    for name in services.processes:
        until(lambda name=name: services.said(name, "ready"), f"{name} is ready")
    assert {name: process.stop() for name, process in services.processes.items()} == dict.fromkeys(
        services.processes, 0
    )
