"""KV goes from GPU to GPU, whole and to the right place: tokens are those of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.contracts.inference import LegKind
from tests.gpu.conftest import DECODE, PREFILL, Pair, driver_of
from tests.support.kv_driver import BLOCK, Driver, transfer_report_of
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.nats]

AT_ONCE = 12


@pytest.fixture
async def driver(pair: Pair) -> AsyncIterator[Driver]:
    async with driver_of(pair) as driver:
        yield driver


@pytest.mark.parametrize("tokens", [40, 333, 1000, 3500])
async def test_a_handoff_gives_the_tokens_of_one_engine(driver: Driver, tokens):
    """Proves: the decode engine reads every full block from the other engine's GPU memory, and computes on with it as
    one engine would have. Fails on a wrong address, layout, device number, or a read before the GPU has written.
    """
    await driver.hand_over(PREFILL, DECODE, random_prompt(f"handoff {tokens}", tokens))


async def test_a_followed_prompt_gives_the_tokens_of_one_engine(driver: Driver):
    """Proves: blocks that are read while the prompt is computed were written before. The GPU runs behind the scheduler,
    so a lease that is granted too early would hand out unwritten memory.
    """
    prompt = random_prompt("followed", 3500)
    alone = await driver.alone(DECODE, prompt)

    source = driver.source(PREFILL, follow=True)
    prefill, decode = await asyncio.gather(
        driver.leg(PREFILL, LegKind.PREFILL, prompt), driver.leg(DECODE, LegKind.DECODE, prompt, kv_sources=[source])
    )

    assert prefill.failure is None
    assert transfer_report_of(decode).fetched_tokens == len(prompt) // BLOCK * BLOCK
    assert decode.token_ids == alone


async def test_many_handoffs_at_once_do_not_mix(driver: Driver):
    """Proves: concurrent reads into one GPU land in the blocks of their own requests."""
    prompts = [random_prompt(f"many {number}", 200 + 150 * number) for number in range(AT_ONCE)]
    alone = [await driver.alone(DECODE, prompt) for prompt in prompts]

    async def handed_over(prompt: list[int]) -> list[int]:
        offer = await driver.offered(PREFILL, prompt)
        return (await driver.taken(DECODE, prompt, offer)).token_ids

    assert await asyncio.gather(*map(handed_over, prompts)) == alone


async def test_the_prefill_engine_reads_back_what_the_decode_engine_generated(driver: Driver):
    """Proves: reads work in the other direction, and what was read serves later prompts as its own cache."""
    first = random_prompt("read back", 500)
    answer = await driver.leg(DECODE, LegKind.AGGREGATED, first, fields={"max_tokens": 200})
    history = [*first, *answer.token_ids]
    held = (len(history) - 1) // BLOCK * BLOCK

    fetched = await driver.fetch(PREFILL, history[:held], driver.source(DECODE))
    turn = await driver.leg(PREFILL, LegKind.AGGREGATED, history)

    assert (fetched.fetched, fetched.failure) == (held // BLOCK, "")
    assert transfer_report_of(turn).local_tokens == held
    assert turn.token_ids == await driver.alone(PREFILL, history)
