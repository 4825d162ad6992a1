"""One simulated system for all tests that do it no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.system import System

START_S_MAX = 120.0
SPEEDS = "prefill_tokens_per_s=100000,prefill_base_s=0,decode_base_s=0.002"
FAST = {"WORKER_SIMULATED": SPEEDS}


@pytest.fixture(scope="package")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two prefill and two decode workers with simulated engines; their KV goes over NIXL where it is installed. Its NATS
    is open: some tests speak there for others, which keys would not let them.
    """
    folder = tmp_path_factory.mktemp("simulated")
    arguments = ("--open", "--engine", "simulated", "--prefill", "2", "--decode", "2")
    settings = {
        "WORKER_SIMULATED": f"{SPEEDS},transfer=auto",
        "ROUTER_RESPONSE_BYTES_MAX": "1000000",
        "ROUTER_FILES_BYTES_MAX": "10000000",
    }
    with System(folder, *arguments, env=settings) as system:
        system.wait_ready(START_S_MAX).until_exact(4)
        yield system


@pytest.fixture(scope="package")
def client(simulated: System) -> Iterator[OpenAI]:
    """The official SDK, with nothing changed but the address."""
    with OpenAI(base_url=f"{simulated.endpoint}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client
