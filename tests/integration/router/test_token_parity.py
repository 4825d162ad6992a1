"""A router process asks a simulated worker's process over a real NATS how it tokenizes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import service_process
from tests.support.simulated_system import until_ready

pytestmark = pytest.mark.nats

PATIENCE_S = 120.0


def parity(url: str) -> dict[str, str]:
    """What the router says of each worker."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    told = [sample for sample in samples if sample.name == "baton_router_token_parity" and sample.value]
    return {sample.labels["worker_id"]: sample.labels["state"] for sample in told}


async def until(url: str, expected: dict[str, str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while parity(url) != expected:
            await asyncio.sleep(0.1)


def test_each_worker_that_registers_is_asked_and_agrees(tmp_path: Path):
    with NatsServer(tmp_path, has_buckets=True) as server:
        settings = {"BATON_NATS_URL": server.url, "WORKER_ENGINE": "simulated"}
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with (
            service_process("router", tmp_path, ROUTER_PORT=str(port), **settings),
            service_process("worker", tmp_path, WORKER_WORKER_ID="w1", WORKER_BLOCK_SIZE="16", **settings),
        ):
            until_ready(f"{url}/ready")
            asyncio.run(until(url, {"w1": "agrees"}))
            with service_process("worker", tmp_path, WORKER_WORKER_ID="w2", WORKER_BLOCK_SIZE="128", **settings):
                asyncio.run(until(url, {"w1": "agrees", "w2": "agrees"}))
