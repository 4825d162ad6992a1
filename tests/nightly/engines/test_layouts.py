"""Handoffs between real engines whose KV caches differ in layout: all blocks of a layer together, or all layers of a
block. The models have layers with pages of two lengths, and heads on two ranks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.contracts.inference import LegKind
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.model_families import FAMILIES, make_model
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import WorkerProcess, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

TOGETHER, OTHER = "layers-together", "other"
GEMMA_4_LAYERS = FAMILIES["gemma-4"].differs["num_hidden_layers"]
ONE_RANK = {"cpu_cores": "1"}
TWO_RANKS = {"tensor_parallel_size": "2", "cpu_cores": "0,1"}


@pytest.fixture(
    scope="module",
    params=[("gemma-4", "LBHNC", ONE_RANK), ("qwen3", "BLHNC", TWO_RANKS)],
    ids=["layers apart", "two ranks"],
)
def nats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    from tests.support.cpu_layouts import plugin_in  # Imports vLLM.

    family, layout, ranks = request.param
    folder: Path = tmp_path_factory.mktemp("layouts")
    model = {"model": str(make_model(family, folder)), "served_model_name": MODEL, "max_model_len": "2000"}
    with NatsServer(folder, has_buckets=True) as nats:

        def start(worker_id: str, layout: str, **settings: str) -> WorkerProcess:
            environ = {"PYTHONPATH": plugin_in(folder), "VLLM_KV_CACHE_LAYOUT": layout}
            return start_worker(nats.url, worker_id, folder, environ=environ, **model, **settings)

        together = start(TOGETHER, "BLHNC", role="prefill", cpu_cores="0")
        other = start(OTHER, layout, role="decode", **ranks)
        with ready_workers(nats.url, together, other):
            yield nats


@pytest.fixture
async def driver(nats: NatsServer) -> AsyncIterator[Driver]:
    async with Tap(nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: {TOGETHER, OTHER} <= tap.loads.keys(), "both workers say how busy they are")
        yield driver


async def test_the_layers_of_a_block_lie_together_or_apart(driver: Driver, request: pytest.FixtureRequest):
    layers_apart = "layers apart" in request.node.callspec.id

    assert await driver.pieces_per_block(TOGETHER) == 1
    assert await driver.pieces_per_block(OTHER) == (GEMMA_4_LAYERS if layers_apart else 1)


@pytest.mark.parametrize(("prefill", "decode"), [(TOGETHER, OTHER), (OTHER, TOGETHER)])
async def test_a_prompt_is_handed_over_between_engines_of_different_layouts(driver: Driver, prefill, decode):
    for seed in range(4):
        await driver.hand_over(prefill, decode, random_prompt(f"{prefill}-{seed}", 300 + 150 * seed))


@pytest.mark.parametrize(("reader", "holder"), [(TOGETHER, OTHER), (OTHER, TOGETHER)])
async def test_an_engine_fetches_what_one_of_another_layout_has_cached(driver: Driver, reader, holder):
    prompt = random_prompt(f"cached by {holder}", 500)
    cached = await driver.leg(holder, LegKind.AGGREGATED, prompt)

    fetched = await driver.fetch(reader, prompt, driver.source(holder))
    answer = await driver.leg(reader, LegKind.AGGREGATED, prompt)

    assert (fetched.held, fetched.fetched, fetched.failure) == (0, len(prompt) // BLOCK, "")
    assert transfer_report_of(answer).local_tokens == len(prompt) // BLOCK * BLOCK
    assert answer.token_ids == cached.token_ids
