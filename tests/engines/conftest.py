from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus.nats_bus import connect_nats
from tests.support.nats_server import NatsServer
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.worker_processes import Router, WorkerProcess, ready_workers, start_worker


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with NatsServer(tmp_path_factory.mktemp("nats"), has_buckets=True) as server:
        url = server.url
        yield url


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="session")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as one:
        yield one


@pytest.fixture(scope="session")
def pair(nats_url: str, run_dir: Path, receiver: OtlpReceiver) -> Iterator[tuple[WorkerProcess, ...]]:
    """A prefill and a decode worker with real engines, shared by all tests: each takes half a minute to start. They trace
    only what asks for it.
    """
    tracing = {"BATON_OTLP_ENDPOINT": receiver.endpoint, "BATON_TRACE_SAMPLE_RATIO": "0"}
    both = {
        "environ": tracing,
        "max_model_len": "8192",
        "engine_args": "--enable-auto-tool-choice --tool-call-parser pythonic",
    }
    with ready_workers(
        nats_url,
        start_worker(nats_url, "p1", run_dir, role="prefill", cpu_cores="0", **both),
        start_worker(nats_url, "d1", run_dir, role="decode", cpu_cores="1", **both),
    ) as pair:
        yield pair


@pytest.fixture
async def router(nats_url: str) -> AsyncIterator[Router]:
    bus = await connect_nats(nats_url, name="test-router", connect_s_max=30.0)
    router = Router(bus)
    await router.open()
    yield router
    await router.inbox.close()
    await bus.close()
