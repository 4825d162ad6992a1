"""Engines on CUDA keep all layers of a block together, and exchange KV with engines that do not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gpu.conftest import DECODE, PREFILL, Pair, driver_of, running
from tests.gpu.places import layout_of, place
from tests.support.kv_driver import Driver
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.nats]


@pytest.fixture(scope="module", params=["", "LBHNC"], ids=["both together", "decode engine apart"])
def layouts(request: pytest.FixtureRequest, one_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("layouts")
    prefill, decode = layout_of(place(0), "", folder), layout_of(place(1), request.param, folder)
    with running(folder, prefill, decode) as pair:
        yield pair


@pytest.fixture
async def driver(layouts: Pair) -> AsyncIterator[Driver]:
    async with driver_of(layouts) as driver:
        yield driver


async def test_an_engine_on_cuda_keeps_a_block_in_one_piece(driver: Driver, request: pytest.FixtureRequest):
    """Proves: vLLM gives the connector the layout that it asks for, on a GPU that has kernels for it."""
    is_apart = "apart" in request.node.callspec.id

    assert await driver.pieces_per_block(PREFILL) == 1
    assert (await driver.pieces_per_block(DECODE) > 1) == is_apart


@pytest.mark.parametrize(("prefill", "decode"), [(PREFILL, DECODE), (DECODE, PREFILL)], ids=["to decode", "back"])
async def test_a_prompt_is_handed_over_between_layouts(driver: Driver, layouts: Pair, prefill, decode):
    """Proves: an engine on CUDA gets the layout in which a block is one piece, its kernels compute with it, and reads find
    every layer of a block, also where only one of the two engines has that layout.
    """
    block = (await layouts.records())[decode].hashing.block_size
    for seed in range(4):
        await driver.hand_over(prefill, decode, random_prompt(f"{prefill} {seed}", 300 + 400 * seed), block)
