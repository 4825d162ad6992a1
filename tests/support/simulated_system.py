"""The whole system with simulated engines: every service a process of its own, on a real NATS server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import ServiceProcess, service_process

READY_S_MAX = 120.0
CHECK_S = 0.1
REQUEST_S_MAX = 60.0


@dataclass
class SimulatedSystem:
    """Prefill worker p1 and decode worker d1 behind one router."""

    router_url: str
    collector_url: str
    processes: dict[str, ServiceProcess] = field(default_factory=dict)

    def complete(self, prompt: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.router_url}/v1/completions",
            json={"model": "baton-tiny", "prompt": prompt, "max_tokens": 8, **body},
            headers=headers,
            timeout=REQUEST_S_MAX,
        )


@contextmanager
def simulated_system(
    directory: Path, nats_server: NatsServer, *, router_files_max: int = 0, **settings: str
) -> Iterator[SimulatedSystem]:
    """A system that answers, until the block ends. ``settings`` are variables for all of its processes,
    ``router_files_max`` is the router's limit of open files.
    """
    router_port, collector_port = free_port(), free_port()
    system = SimulatedSystem(f"http://127.0.0.1:{router_port}", f"http://127.0.0.1:{collector_port}")
    common = {"BATON_NATS_URL": nats_server.url, **settings}
    worker = {"WORKER_ENGINE": "simulated"}
    services = {
        "orchestrator": ("orchestrator", {}),
        "collector": ("collector", {"COLLECTOR_PORT": str(collector_port)}),
        "router": ("router", {"ROUTER_PORT": str(router_port)}),
        "p1": ("worker", {**worker, "WORKER_WORKER_ID": "p1", "WORKER_ROLE": "prefill"}),
        "d1": ("worker", {**worker, "WORKER_WORKER_ID": "d1", "WORKER_ROLE": "decode"}),
    }
    with ExitStack() as running:
        for name, (service, own) in services.items():
            files_max = router_files_max if name == "router" else 0
            system.processes[name] = running.enter_context(
                service_process(service, directory, files_max=files_max, **common, **own)
            )
        until_ready(f"{system.collector_url}/ready")
        until_disaggregated(system)
        yield system


def until_ready(url: str) -> None:
    """Until ``url`` answers 200."""
    deadline = time.monotonic() + READY_S_MAX
    while not _answers(url):
        assert time.monotonic() < deadline, f"{url} is not ready"
        time.sleep(CHECK_S)


def until_disaggregated(system: SimulatedSystem) -> None:
    """Until both workers take part in a request: a router is ready as soon as it knows one of them."""
    until_ready(f"{system.router_url}/ready")
    deadline = time.monotonic() + READY_S_MAX
    for number in count():  # another prompt each time: what one worker has answered alone it answers alone again
        answer = system.complete(f"Are both of you there, {number}? " * 20)
        if answer.headers.get("x-baton-mode") == "disaggregated":
            return
        assert time.monotonic() < deadline, f"no disaggregated answer, but {answer.status_code} {answer.headers}"
        time.sleep(CHECK_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=REQUEST_S_MAX).status_code == 200
    except httpx.TransportError:
        return False
