"""A conversation that its engine has evicted comes back from a store in host memory: to the engine and, after that one was
killed, to one with another tensor parallel size; or when it is prefetched, before its next turn.
``tests/nightly/test_killed_copies.py`` kills during copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import StoreState
from tests.support.kv_driver import BLOCK, Driver, transfer_report_of
from tests.support.kv_world import KvWorld, driver_of, kv_world
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

ENGINE, OTHER, STORE = "one-rank", "two-ranks", "store"
TOKENS = 4000
FULL = TOKENS // BLOCK
ENGINE_BYTES = 24 << 20
"""KV of 12,000 tokens: three conversations."""
ROOMY_BYTES = 36 << 20
"""Of these, a quarter may be prefetched: more than one conversation."""
STORE_BYTES = 40 << 20
FILLERS = 4


SMALL = {"role": "both", "kv_cache_bytes": str(ENGINE_BYTES), "max_model_len": "5000"}
SETTINGS = {
    ENGINE: {"cpu_cores": "0", **SMALL},
    OTHER: {"cpu_cores": "0,1", "tensor_parallel_size": "2", **SMALL},
    STORE: {"role": "store", "store_memory_bytes": str(STORE_BYTES), "store_files_bytes": "0"},
}


@dataclass
class MemoryWorld(KvWorld):
    fillers: int = 0

    async def add(self, driver: Driver, name: str) -> None:
        self.start(name, **SETTINGS[name])
        await self.ready(driver)

    async def evict(self, driver: Driver, prompt: list[int], *, stored: bool) -> None:
        """Send other conversations until the engine holds nothing of the prompt. With a new store, let it have what is
        evicted next before each of them.
        """
        for number in range(1, FILLERS + 1):
            if stored:
                due = number * FULL
                await driver.tap.until(
                    lambda due=due: sum(copies(driver)) >= due, f"{due} are copied: {copies(driver)}"
                )
            self.fillers += 1
            await driver.leg(ENGINE, LegKind.AGGREGATED, random_prompt(f"filler {self.fillers}", TOKENS))
        assert (await driver.fetch(ENGINE, prompt)).held == 0


def copies(driver: Driver) -> tuple[int, int]:
    state = driver.tap.loads[ENGINE].exchange or KvExchangeState()
    return state.copied_blocks_total, state.lost_blocks_total


def stored_bytes(driver: Driver) -> int:
    state = driver.tap.loads[STORE].store or StoreState()
    return state.host_blocks * state.block_bytes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MemoryWorld]:
    with kv_world(tmp_path, MemoryWorld) as world:
        yield world


async def ask(driver: Driver, worker: str, prompt: list[int], *, stored: bool) -> tuple[list[int], int, int]:
    """The answer, and how many tokens came from the store and were computed."""
    sources = [driver.source(STORE)] if stored else []
    answer = await driver.leg(worker, LegKind.AGGREGATED, prompt, kv_sources=sources)
    report = transfer_report_of(answer)
    assert {read.worker_id for read in report.reads if read.tokens} <= {STORE}
    return answer.token_ids, report.fetched_tokens, report.recomputed_tokens


async def test_evicted_conversations_come_back_from_host_memory(world: MemoryWorld):
    prompt = random_prompt("conversation", TOKENS)
    async with driver_of(world) as driver:
        await world.add(driver, ENGINE)
        expected, _fetched, computed = await ask(driver, ENGINE, prompt, stored=False)
        assert computed == TOKENS
        await world.evict(driver, prompt, stored=False)
        assert await ask(driver, ENGINE, prompt, stored=False) == (expected, 0, TOKENS), "without a store it is gone"
        assert copies(driver) == (0, 0)

        await world.add(driver, STORE)
        await world.evict(driver, prompt, stored=True)
        assert (await driver.fetch(STORE, prompt)).held == FULL
        assert await ask(driver, ENGINE, prompt, stored=True) == (expected, TOKENS - 1, 1)
        assert 0 < stored_bytes(driver) <= STORE_BYTES
        world.kill(ENGINE)

        await world.add(driver, OTHER)
        assert await ask(driver, OTHER, prompt, stored=True) == (expected, TOKENS - 1, 1)
        assert 0 < stored_bytes(driver) <= STORE_BYTES


async def with_store(world: MemoryWorld, driver: Driver) -> None:
    """An engine of which a quarter holds the conversation, and a store that copies only what it is told to."""
    settings = {**SETTINGS[ENGINE], "kv_cache_bytes": str(ROOMY_BYTES), "kv_copy_uses_min": "0"}
    world.start(ENGINE, **settings)
    await world.add(driver, STORE)


async def leave_to_store(world: MemoryWorld, driver: Driver, prompt: list[int]) -> None:
    """Have the store copy what the engine has of the prompt, and the engine evict it."""
    held = await driver.fetch(STORE, prompt, driver.source(ENGINE))
    assert held.held + held.fetched == FULL, held
    for _ in range(FILLERS + 1):
        world.fillers += 1
        await driver.leg(ENGINE, LegKind.AGGREGATED, random_prompt(f"filler {world.fillers}", TOKENS))
    assert (await driver.fetch(ENGINE, prompt)).held == 0
    assert (await driver.fetch(STORE, prompt)).held == FULL


async def test_a_prefetched_turn_fetches_nothing_itself_and_answers_the_same(world: MemoryWorld):
    prompt = random_prompt("prefetched conversation", TOKENS)
    turn = [*prompt, *random_prompt("its next turn", 100)]
    computed = len(turn) - TOKENS
    async with driver_of(world) as driver:
        await with_store(world, driver)
        expected = await driver.alone(ENGINE, turn)
        await driver.leg(ENGINE, LegKind.AGGREGATED, prompt)
        await leave_to_store(world, driver, prompt)
        assert await ask(driver, ENGINE, turn, stored=True) == (expected, TOKENS, computed), "without a prefetch"
        await leave_to_store(world, driver, prompt)

        done = await driver.prefetch(ENGINE, turn, driver.source(STORE))

        assert (done.prompt_tokens, done.held_tokens, done.fetched_tokens) == (len(turn), 0, TOKENS), done
        assert await ask(driver, ENGINE, turn, stored=True) == (expected, 0, computed)
        await driver.tap.until(lambda: used(driver) == (FULL, FULL), "used blocks are told")


async def test_a_turn_that_comes_during_its_prefetch_reads_nothing_twice(world: MemoryWorld):
    prompt = random_prompt("joined conversation", TOKENS)
    async with driver_of(world) as driver:
        await with_store(world, driver)
        expected = await driver.alone(ENGINE, prompt)
        await driver.leg(ENGINE, LegKind.AGGREGATED, prompt)
        await leave_to_store(world, driver, prompt)
        before = read_bytes(driver)

        order = asyncio.create_task(driver.prefetch(ENGINE, prompt, driver.source(STORE)))
        tokens, fetched, _computed = await ask(driver, ENGINE, prompt, stored=True)

        done = await order
        assert tokens == expected
        await driver.tap.until_settled(ENGINE, STORE)
        state = driver.tap.loads[STORE].store
        assert state is not None
        assert read_bytes(driver) - before == FULL * state.block_bytes, (fetched, done)


def used(driver: Driver) -> tuple[int, int]:
    """Blocks that were prefetched, and those of them that requests found."""
    state = driver.tap.loads[ENGINE].exchange or KvExchangeState()
    return state.prefetched_blocks_total, state.prefetch_used_blocks_total


def read_bytes(driver: Driver) -> int:
    return (driver.tap.loads[ENGINE].exchange or KvExchangeState()).read_bytes_total
