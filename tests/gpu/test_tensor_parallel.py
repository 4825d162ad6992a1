"""Engines on one GPU and on two exchange KV: each rank reads the heads that it owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gpu.conftest import DECODE, PREFILL, Pair, driver_of, running
from tests.gpu.places import place
from tests.support.kv_driver import Driver
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.nats]


@pytest.fixture(scope="module")
def ranks(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The prefill engine on the first GPU, the decode engine on both."""
    with running(tmp_path_factory.mktemp("ranks"), place(0), place(0, 1)) as pair:
        yield pair


@pytest.fixture
async def driver(ranks: Pair) -> AsyncIterator[Driver]:
    async with driver_of(ranks) as driver:
        yield driver


@pytest.mark.parametrize(("prefill", "decode"), [(PREFILL, DECODE), (DECODE, PREFILL)], ids=["1 to 2", "2 to 1"])
async def test_a_prompt_is_handed_over_between_one_gpu_and_two(driver: Driver, prefill, decode):
    """Proves: heads are split and joined right between GPUs, and each rank names the GPU that holds the block."""
    for seed in range(4):
        await driver.hand_over(prefill, decode, random_prompt(f"{prefill} {seed}", 300 + 400 * seed))
