"""A conversation that its engine has evicted comes back from a store in host memory: to the engine and, after that one was
killed, to one with another tensor parallel size. ``tests/nightly/test_killed_copies.py`` kills during copies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import StoreState
from tests.support.kv_driver import BLOCK, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import WorkerProcess, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

ENGINE, OTHER, STORE = "one-rank", "two-ranks", "store"
TOKENS = 4000
FULL = TOKENS // BLOCK
ENGINE_BYTES = 24 << 20
"""KV of 12,000 tokens: three conversations."""
STORE_BYTES = 40 << 20
FILLERS = 4


@dataclass
class World:
    nats: NatsServer
    folder: Path
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    fillers: int = 0

    async def start(self, driver: Driver, *names: str) -> None:
        small = {"kv_cache_bytes": str(ENGINE_BYTES), "max_model_len": "5000"}
        settings = {
            ENGINE: {"role": "both", "cpu_cores": "0", **small},
            OTHER: {"role": "both", "cpu_cores": "0,1", "tensor_parallel_size": "2", **small},
            STORE: {"role": "store", "store_memory_bytes": str(STORE_BYTES), "store_files_bytes": "0"},
        }
        for name in names:
            self.workers[name] = start_worker(self.nats.url, name, self.folder, **settings[name])
        await wait_ready(self.nats.url, [self.workers[name] for name in names])
        epochs = {name: self.workers[name].record for name in names}
        assert all(epochs.values())
        await driver.tap.until(
            lambda: all((load := driver.tap.loads.get(name)) and load.epoch == epochs[name].epoch for name in names),
            "all workers report",
        )

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
def world(tmp_path: Path) -> Iterator[World]:
    with NatsServer(tmp_path, has_buckets=True) as nats:
        world = World(nats, tmp_path)
        try:
            yield world
        finally:
            for worker in world.workers.values():
                worker.kill()


@asynccontextmanager
async def driver_of(world: World) -> AsyncIterator[Driver]:
    async with Tap(world.nats.url) as tap, driving(tap) as driver:
        yield driver


async def ask(driver: Driver, worker: str, prompt: list[int], *, stored: bool) -> tuple[list[int], int, int]:
    """The answer, and how many tokens came from the store and were computed."""
    sources = [driver.source(STORE)] if stored else []
    answer = await driver.leg(worker, LegKind.AGGREGATED, prompt, kv_sources=sources)
    report = transfer_report_of(answer)
    assert {read.worker_id for read in report.reads if read.tokens} <= {STORE}
    return answer.token_ids, report.fetched_tokens, report.recomputed_tokens


async def test_evicted_conversations_come_back_from_host_memory(world: World):
    prompt = random_prompt("conversation", TOKENS)
    async with driver_of(world) as driver:
        await world.start(driver, ENGINE)
        expected, _fetched, computed = await ask(driver, ENGINE, prompt, stored=False)
        assert computed == TOKENS
        await world.evict(driver, prompt, stored=False)
        assert await ask(driver, ENGINE, prompt, stored=False) == (expected, 0, TOKENS), "without a store it is gone"
        assert copies(driver) == (0, 0)

        await world.start(driver, STORE)
        await world.evict(driver, prompt, stored=True)
        assert (await driver.fetch(STORE, prompt)).held == FULL
        assert await ask(driver, ENGINE, prompt, stored=True) == (expected, TOKENS - 1, 1)
        assert 0 < stored_bytes(driver) <= STORE_BYTES
        world.workers.pop(ENGINE).kill()

        await world.start(driver, OTHER)
        assert await ask(driver, OTHER, prompt, stored=True) == (expected, TOKENS - 1, 1)
        assert 0 < stored_bytes(driver) <= STORE_BYTES
