"""Three router processes behind one port, on a real NATS, before simulated workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import ServiceProcess, service_process
from tests.support.simulated_system import until_ready
from tests.support.system import until

pytestmark = pytest.mark.nats

ROUTERS, WORKERS = 3, 4
PATIENCE_S = 120.0
SLOW = {"WORKER_ENGINE": "simulated", "WORKER_SIMULATED": "decode_base_s=0.02"}
"""Engines whose legs last longer than a burst."""


@dataclass
class Replicas:
    url: str
    own_urls: list[str]
    routers: list[ServiceProcess]

    async def complete(self, prompt: str, max_tokens: int) -> httpx.Response:
        """Over a connection of its own: the kernel chooses the router."""
        body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            return await client.post(f"{self.url}/v1/completions", json=body)

    async def burst(self, requests: int, gap_s: float) -> Counter[str]:
        """Requests on their way at the same time; answers how many legs each worker had."""
        asked = []
        for number in range(requests):
            asked.append(asyncio.ensure_future(self.complete(f"{number} {PROMPT}", 64)))
            await asyncio.sleep(gap_s)
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        return Counter(answer.headers["x-baton-decode-worker"] for answer in answers)

    def metric(self, router: int, name: str) -> float:
        text = httpx.get(f"{self.own_urls[router]}/metrics", trust_env=False).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )


PROMPT = "The relay of a request begins with its prompt. " * 40


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """The last test kills one of them."""
    tmp_path = tmp_path_factory.mktemp("replicas")
    with ExitStack() as running:
        nats = {"BATON_NATS_URL": running.enter_context(NatsServer(tmp_path, has_buckets=True)).url}
        shared, own = free_port(), [free_port() for _ in range(ROUTERS)]
        ports = [{"ROUTER_PORT": str(port), "ROUTER_SHARED_PORT": str(shared)} for port in own]
        for number in range(WORKERS):
            running.enter_context(service_process("worker", tmp_path, WORKER_WORKER_ID=f"w{number}", **nats, **SLOW))
        routers = [running.enter_context(service_process("router", tmp_path, **nats, **port)) for port in ports]
        system = Replicas(f"http://127.0.0.1:{shared}", [f"http://127.0.0.1:{port}" for port in own], routers)
        for number, url in enumerate(system.own_urls):
            until_ready(f"{url}/ready")
            until_sees(system, number, workers=WORKERS, routers=ROUTERS - 1)
        yield system


def until_sees(system: Replicas, router: int, *, workers: int, routers: int) -> None:
    """Until that router knows all workers and the other routers."""

    async def looking() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while sees(system, router) != (workers, routers):
                await asyncio.sleep(0.1)

    asyncio.run(looking())


def sees(system: Replicas, router: int) -> tuple[int, int]:
    text = httpx.get(f"{system.own_urls[router]}/metrics", trust_env=False).text
    exact = sum('state="exact"' in line and line.endswith(" 1.0") for line in text.splitlines())
    return exact, int(system.metric(router, "baton_router_peers"))


async def test_a_burst_through_the_one_port_is_spread_as_one_router_would(replicas: Replicas):
    requests = 4 * WORKERS

    legs = await replicas.burst(requests, gap_s=0.01)

    def served() -> list[float]:
        return [replicas.metric(router, "baton_router_requests_total") for router in range(ROUTERS)]

    until(lambda: sum(served()) == requests, "all of them are counted")
    assert sum(count > 0 for count in served()) > 1
    assert sum(legs.values()) == requests
    # A worker whose process a busy machine holds up does not report its load meanwhile, and routers leave it out.
    assert len(legs) >= WORKERS - 1, legs
    assert max(legs.values()) <= 2 * requests / WORKERS, legs


async def test_when_a_router_is_killed_the_others_go_on_and_forget_it(replicas: Replicas):
    await replicas.burst(WORKERS, gap_s=0.0)

    replicas.routers[0].kill()

    legs = await replicas.burst(2 * WORKERS, gap_s=0.01)
    assert sum(legs.values()) == 2 * WORKERS
    async with asyncio.timeout(PATIENCE_S):
        while [replicas.metric(router, "baton_router_peers") for router in (1, 2)] != [1, 1]:
            await asyncio.sleep(0.2)
