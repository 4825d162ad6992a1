"""KV self-tests of real engines whose next tokens are nearly equally likely, so that no token tells right KV from wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.worker.lifecycle.self_test import LOGPROB_DIFFERENCE_MAX
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus
from shared.contracts.fleet_orders import SelfTestResult
from tests.engines.forged_reads import ENGINE_ARGS, FORGERY_FILE, Forgery, spoil, spoiled
from tests.engines.self_tests import named, run_self_test
from tests.support.model_families import FAMILIES, make_model
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import WorkerProcess, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

HOLDER, READER = "p1", "d1"
FLAT = {"num_hidden_layers": 6, "initializer_range": 0.02}
TESTS = 6
"""At a time; a worker computes at most eight prompts for others."""
FAMILY = "gpt-oss"
Workers = tuple[str, list[WorkerProcess]]
"""The address of NATS, and the holder and the reader."""


@pytest.fixture(scope="module")
def forgery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says how the reader's engine spoils what it reads."""
    file = tmp_path_factory.mktemp("forgery") / "forgery"
    spoil(file)
    return file


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, forgery: Path) -> Iterator[Workers]:
    """They became ready, so a self-test has passed in both directions."""
    folder = tmp_path_factory.mktemp("self-tests")
    with forging_pair(folder, make_model(FAMILY, folder, **FLAT), forgery) as workers:
        asyncio.run(wait_ready(*workers))
        yield workers


@contextmanager
def forging_pair(folder: Path, model: Path, forgery: Path) -> Iterator[Workers]:
    """A holder and a reader that start."""
    settings = {"model": str(model), "served_model_name": "flat", "max_model_len": "1000", "engine_args": ENGINE_ARGS}
    environ = {FORGERY_FILE: str(forgery)}
    with NatsServer(folder, has_buckets=True) as nats:
        workers = [
            start_worker(nats.url, HOLDER, folder, role="prefill", cpu_cores="0", environ=environ, **settings),
            start_worker(nats.url, READER, folder, role="decode", cpu_cores="1", environ=environ, **settings),
        ]
        try:
            yield nats.url, workers
        finally:
            for worker in workers:
                worker.kill()


@pytest.fixture
async def bus(workers: Workers) -> AsyncIterator[Bus]:
    bus = await connect_nats(workers[0], name="self-tests", connect_s_max=30.0)
    yield bus
    await bus.close()


async def run(bus: Bus, workers: Workers) -> SelfTestResult:
    """The reader reads a prompt of the holder."""
    return await run_self_test(bus, READER, workers[1][0])


async def test_right_kv_passes_however_near_the_tokens_are(bus: Bus, workers: Workers):
    """Alone and many at a time: then the holder computes several prompts in one step, and the reader several tails."""
    results = [await run(bus, workers)]
    results += await asyncio.gather(*(run(bus, workers) for _time in range(TESTS)))

    assert [result.failure for result in results] == [""] * len(results)
    assert max(result.logprob_difference for result in results) < LOGPROB_DIFFERENCE_MAX / 100


@pytest.mark.parametrize("group", range(FAMILIES[FAMILY].groups))
@pytest.mark.parametrize("kind", [Forgery.SWAPPED, Forgery.ZEROED])
async def test_wrong_kv_of_one_group_fails_though_the_tokens_hardly_show_it(
    kind: Forgery, group: int, bus: Bus, workers: Workers, forgery: Path
):
    with spoiled(forgery, kind, group, FAMILIES[FAMILY].groups):
        result = await run(bus, workers)

    assert named(result.failure) == group, result.failure
    assert (await run(bus, workers)).failure == ""
