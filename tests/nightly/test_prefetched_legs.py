"""Prefetches from a store among simulated workers: legs find what was fetched, join what is being fetched, and are right
whatever dies meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from services.worker.engines.simulated.core.settings import SimulationSettings
from shared.bus.port import BusError
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvExchangeState
from tests.e2e.test_store import BLOCK, PROMPT_TOKENS, SETTINGS, STORE, StoreWorld, draw, world
from tests.support.kv_driver import Driver, transfer_report_of
from tests.support.kv_world import driver_of

pytestmark = pytest.mark.nats
__all__ = ("world",)

FULL = PROMPT_TOKENS // BLOCK
BLOCK_BYTES = BLOCK * SimulationSettings().kv_bytes_per_token
SLOW = {"simulated": f"{SETTINGS['simulated']},transfer_bytes_per_s={FULL * BLOCK_BYTES / 2}"}
"""The prompt's blocks take two seconds to read."""
IN_STORE = {**STORE, "store_memory_bytes": STORE["store_files_bytes"]}
SETTLED_S_MAX = 90.0
"""A lease of a killed reader ends within a minute."""


async def stored(world: StoreWorld, driver: Driver, prompt: list[int]) -> list[int]:
    """Have the store copy the prompt from p1, and nobody else have it; returns the tokens of its answer."""
    expected = await driver.alone("p1", prompt)
    await driver.leg("p1", LegKind.AGGREGATED, prompt)
    assert (await driver.fetch("s1", prompt, driver.source("p1"))).fetched == FULL
    await driver.tap.until_settled("p1", "s1")
    return expected


def start(world: StoreWorld, **of_reader: str) -> None:
    world.start("p1", role="prefill")
    world.start("d1", role="decode", **of_reader)
    world.start("s1", **IN_STORE)


def state(driver: Driver, worker: str = "d1") -> KvExchangeState:
    return driver.tap.loads[worker].exchange or KvExchangeState()


async def ask(driver: Driver, prompt: list[int]) -> tuple[list[int], int, int]:
    """The answer of d1 with the store as source; how many tokens it had, and how many it fetched."""
    answer = await driver.leg("d1", LegKind.AGGREGATED, prompt, kv_sources=[driver.source("s1")])
    report = transfer_report_of(answer)
    return answer.token_ids, report.local_tokens, report.fetched_tokens


async def test_a_leg_finds_what_was_prefetched_from_a_store(world: StoreWorld):
    start(world)
    async with driver_of(world) as driver:
        with_order, without = draw(60), draw(61)
        tokens = {60: await stored(world, driver, with_order), 61: await stored(world, driver, without)}

        done = await driver.prefetch("d1", with_order, driver.source("s1"))

        assert (done.prompt_tokens, done.held_tokens, done.failure) == (PROMPT_TOKENS, 0, "")
        assert (done.fetched_tokens, done.bytes) == (FULL * BLOCK, FULL * BLOCK_BYTES)
        assert await ask(driver, with_order) == (tokens[60], FULL * BLOCK, 0)
        assert await ask(driver, without) == (tokens[61], 0, FULL * BLOCK), "without an order it is fetched by the leg"
        await driver.tap.until(lambda: state(driver).prefetch_used_blocks_total == FULL, "used blocks are told")
        assert state(driver).prefetched_blocks_total == FULL


async def test_a_leg_that_comes_during_its_prefetch_reads_nothing_twice(world: StoreWorld):
    start(world, **SLOW)
    prompt = draw(62)
    async with driver_of(world) as driver:
        expected = await stored(world, driver, prompt)
        before = state(driver).read_bytes_total

        order = asyncio.create_task(driver.prefetch("d1", prompt, driver.source("s1")))
        await driver.tap.until(lambda: state(driver).reads or order.done(), "the prefetch reads")
        answer = await ask(driver, prompt)

        assert (await order).fetched_tokens == FULL * BLOCK
        assert answer == (expected, FULL * BLOCK, 0)
        await driver.tap.until_settled("d1", "s1")
        assert state(driver).read_bytes_total - before == FULL * BLOCK_BYTES


@pytest.mark.parametrize("killed", ["s1", "d1"])
async def test_whoever_dies_during_a_prefetch_answers_stay_right_and_nothing_stays_pinned(
    world: StoreWorld, killed: str
):
    start(world, **SLOW)
    prompt = draw(63)
    async with driver_of(world) as driver:
        expected = await stored(world, driver, prompt)
        order = asyncio.create_task(driver.prefetch("d1", prompt, driver.source("s1"), deadline_s=5.0))
        await driver.tap.until(lambda: state(driver).reads or order.done(), "the prefetch reads")
        os.kill(world.workers[killed].process.pid, signal.SIGKILL)
        world.kill(killed)
        if killed == "s1":
            done = await order
            assert done.failure
            assert done.fetched_tokens < FULL * BLOCK
            assert (await driver.leg("d1", LegKind.AGGREGATED, prompt)).token_ids == expected
            await driver.tap.until_settled("d1")
        else:
            with pytest.raises(BusError):
                await order
            await driver.tap.until_settled("s1", s_max=SETTLED_S_MAX)


async def test_a_full_engine_prefetches_nothing_and_evicts_nothing_that_runs(world: StoreWorld):
    blocks = 2 * FULL
    takes_its_time = SETTINGS["simulated"].replace("decode_base_s=0", "decode_base_s=0.2")
    start(world, simulated=takes_its_time, kv_cache_bytes=str(blocks * BLOCK_BYTES))
    prompt = draw(64)
    async with driver_of(world) as driver:
        await stored(world, driver, prompt)
        long = draw(65) + draw(66)[: PROMPT_TOKENS - 3 * BLOCK]
        running = await driver.start("d1", LegKind.AGGREGATED, long, fields={"max_tokens": 2 * BLOCK})
        await driver.tap.until(lambda: driver.tap.loads["d1"].running, "the engine is full")

        done = await driver.prefetch("d1", prompt, driver.source("s1"))

        assert (done.fetched_tokens, done.failure) == (0, "no memory is free")
        assert driver.tap.loads["d1"].running, "the request runs on"
        assert (await running.frames())[-1].failure is None
