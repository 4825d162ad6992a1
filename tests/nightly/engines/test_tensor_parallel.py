"""Handoffs between real engines of different tensor-parallel sizes: each rank reads the heads that it owns.

The model is a tiny Gemma 3, five of whose six layers have a sliding window: they too are read whole. Other families run in
``test_models.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.contracts.inference import LegKind
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.model_families import make_model
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

WHOLE, HALVES = "one-rank", "two-ranks"
TWO_RANKS = {"tensor_parallel_size": "2", "cpu_cores": "0,1"}


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    model = {"model": str(make_model("gemma-3", folder)), "served_model_name": MODEL, "max_model_len": "2000"}
    with (
        NatsServer(folder, has_buckets=True) as nats,
        ready_workers(
            nats.url,
            start_worker(nats.url, WHOLE, folder, role="prefill", cpu_cores="0", **model),
            start_worker(nats.url, HALVES, folder, role="decode", **model, **TWO_RANKS),
        ) as workers,
    ):
        for worker in workers:
            assert worker.record is not None
            assert "5 of 6 layers attend to 64 tokens but keep the KV of all" in worker.record.note
        yield nats


@pytest.fixture
async def driver(nats: NatsServer) -> AsyncIterator[Driver]:
    async with Tap(nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: {WHOLE, HALVES} <= tap.loads.keys(), "both workers say how busy they are")
        yield driver


@pytest.mark.parametrize(("prefill", "decode"), [(WHOLE, HALVES), (HALVES, WHOLE)])
async def test_a_prompt_is_handed_over_between_engines_of_different_tensor_parallelism(driver: Driver, prefill, decode):
    for seed in range(5):
        await driver.hand_over(prefill, decode, random_prompt(f"{prefill}-{seed}", 300 + 100 * seed))


async def test_ranks_fetch_what_another_engine_has_cached(driver: Driver):
    prompt = random_prompt("fetched", 500)
    await driver.leg(WHOLE, LegKind.AGGREGATED, prompt)

    fetched = await driver.fetch(HALVES, prompt, driver.source(WHOLE))

    assert (fetched.held, fetched.fetched, fetched.failure) == (0, len(prompt) // BLOCK, "")
