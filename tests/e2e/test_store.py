"""A store among simulated workers: what it gives is what was put there, from memory and from files, before and after it
was killed, and when its files were spoilt meanwhile. The nightly ``test_store_of_windows.py`` has a model with windows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.store.records import BLOCK_BYTES_COUNTED_MIN
from shared.contracts.channels import KV_SNAPSHOT
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.workers import Role
from tests.support.kv_driver import BLOCK, Driver, transfer_report_of
from tests.support.kv_world import KvWorld, driver_of, kv_world
from tests.support.worker_processes import WorkerProcess

pytestmark = pytest.mark.nats

BLOCKS_IN_MEMORY, PLACES_IN_FILES = 32, 256
ENGINE_BLOCKS, PROMPTS_HELD = 96, 4
"""Of an engine that holds four prompts, and tells of the next to be evicted while it is whole."""
PROMPT_TOKENS = 20 * BLOCK + 5
HASH_BYTES = 8
START_S_MAX = 120.0
SETTINGS = {
    "engine": "simulated",
    "simulated": "prefill_tokens_per_s=0,prefill_base_s=0,decode_base_s=0,transfer_base_s=0",
    "kv_copy_uses_min": "0",
}
STORE = {
    "role": "store",
    "store_memory_bytes": str(BLOCKS_IN_MEMORY * BLOCK_BYTES_COUNTED_MIN),
    "store_files_bytes": str(PLACES_IN_FILES * BLOCK_BYTES_COUNTED_MIN),
}


def draw(seed: int) -> list[int]:
    return random.Random(seed).choices(range(200, 2000), k=PROMPT_TOKENS)


class StoreWorld(KvWorld):
    """Simulated workers."""

    def start(self, name: str, **settings: str) -> WorkerProcess:
        return super().start(name, **{**SETTINGS, **settings})

    def start_store(self) -> WorkerProcess:
        return self.start("s1", **STORE)

    def spoil(self) -> None:
        """Every block in the store's files has a byte that is not its own."""
        file = self.folder / "kv-store" / "s1" / "blocks"
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), HASH_BYTES):  # a simulated block
            data[at] ^= 0xFF
        file.write_bytes(data)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StoreWorld]:
    with kv_world(tmp_path, StoreWorld) as world:
        yield world


async def snapshot(driver: Driver) -> KvSnapshot:
    store = WorkerId("s1")
    ask = AskKvSnapshot(worker_id=store, epoch=driver.tap.loads[store].epoch)
    return await driver.bus.ask(KV_SNAPSHOT, ask, timeout_s=START_S_MAX)


async def until_saved(driver: Driver, blocks: int) -> KvSnapshot:
    """Until so many blocks are in files, as routers are told."""
    heard = lambda: driver.tap.loads["s1"].digest  # noqa: E731
    while len((found := await snapshot(driver)).disk_hashes) < blocks * HASH_BYTES:
        before = heard()
        await driver.tap.until(lambda before=before: heard() != before, "more is saved")
    return found


def damaged(driver: Driver) -> int:
    state = driver.tap.loads["s1"].store
    return state.damaged_blocks_total if state is not None else 0


async def read(driver: Driver, prompt: list[int]) -> int:
    """Have d1 compute the prompt with the store as its only source; how many tokens came from there."""
    answer = await driver.leg("d1", LegKind.AGGREGATED, prompt, kv_sources=[driver.source("s1")])
    assert answer.token_ids == await driver.alone("p1", prompt)
    return transfer_report_of(answer).fetched_tokens


async def test_copies_survive_their_source_and_the_store_s_own_death(world: StoreWorld):
    world.start("p1", role="prefill")
    world.start("d1", role="decode")
    world.start_store()
    prompts = [draw(seed) for seed in range(4)]  # two and a half times what fits into memory
    full = PROMPT_TOKENS // BLOCK
    async with driver_of(world) as driver:
        assert driver.tap.loads["s1"].role is Role.STORE
        for prompt in prompts:
            await driver.leg("p1", LegKind.AGGREGATED, prompt)
            copied = await driver.fetch("s1", prompt, driver.source("p1"))
            assert (copied.held, copied.fetched, copied.failure) == (0, full, "")
            await until_saved(driver, full * (prompts.index(prompt) + 1))
        told = await snapshot(driver)
        assert len(told.host_hashes) == BLOCKS_IN_MEMORY * HASH_BYTES
        assert (told.hashes, len(told.disk_hashes)) == (b"", 4 * full * HASH_BYTES)

        refused = await driver.leg("s1", LegKind.AGGREGATED, prompts[0])
        assert refused.failure is not None
        assert refused.failure.reason is Reason.WORKER_BUSY
        again = await driver.fetch("s1", prompts[0], driver.source("p1"))
        assert (again.held, again.fetched) == (full, 0)
        assert await read(driver, prompts[0]) == full * BLOCK  # from files

    world.kill("s1")
    world.start_store()
    async with driver_of(world) as driver:
        assert len((await until_saved(driver, 4 * full)).host_hashes) == 0
        assert await read(driver, prompts[1]) == full * BLOCK

    assert world.workers.pop("s1").stop() == 0
    world.spoil()
    world.start_store()
    async with driver_of(world) as driver:
        assert await read(driver, prompts[2]) == 0
        await driver.tap.until_settled("p1", "d1", "s1")
        left = await snapshot(driver)
        assert (left.host_hashes, len(left.disk_hashes)) == (b"", 3 * full * HASH_BYTES)
        await driver.tap.until(lambda: damaged(driver) == full, "what was damaged is told")


async def test_workers_copy_to_a_store_what_is_used_twice_and_nothing_else(world: StoreWorld):
    world.start("p1", kv_copy_uses_min="2")
    world.start_store()
    once, twice = draw(10), draw(11)
    full = PROMPT_TOKENS // BLOCK
    async with driver_of(world) as driver:
        for prompt in (twice, once, twice):
            await driver.leg("p1", LegKind.AGGREGATED, prompt)

        told = await until_saved(driver, full)
        assert len(told.disk_hashes) == full * HASH_BYTES
        assert (await driver.fetch("s1", twice)).held == full
        assert (await driver.fetch("s1", once)).held == 0


async def test_workers_copy_to_a_store_what_they_evict(world: StoreWorld):
    await prove_evicted_are_copied(world)


async def test_copies_of_states_survive_a_restart(world: StoreWorld):
    await prove_copies_survive(world, "state")


async def prove_copies_survive(world: StoreWorld, groups: str) -> None:
    """Copies of a model with ``groups`` of windows or states, when the store is restarted."""
    model = {"simulated": f"{SETTINGS['simulated']},groups={groups}"}
    store = {**STORE, **model, "store_memory_bytes": STORE["store_files_bytes"]}
    world.start("p1", role="prefill", **model)
    world.start("d1", role="decode", **model)
    world.start("s1", **store)
    prompt, full = draw(20), PROMPT_TOKENS // BLOCK
    async with driver_of(world) as driver:
        await driver.leg("p1", LegKind.AGGREGATED, prompt)
        copied = await driver.fetch("s1", prompt, driver.source("p1"))
        assert (copied.fetched, copied.failure) == (full, "")
        boundaries = (await until_saved(driver, full)).boundary_hashes
        assert boundaries

    assert world.workers.pop("s1").stop() == 0
    world.start("s1", **store)
    async with driver_of(world) as driver:
        told = await snapshot(driver)
        assert (told.host_hashes, sorted(told.boundary_hashes)) == (b"", sorted(boundaries))
        assert await read(driver, prompt) == full * BLOCK


async def prove_evicted_are_copied(world: StoreWorld, groups: str = "", engine_blocks: int = ENGINE_BLOCKS) -> None:
    """A worker evicts prompts that were used once; afterwards another gets them from the store."""
    model = {"simulated": f"{SETTINGS['simulated']}" + (f",groups={groups}" if groups else "")}
    small = str(engine_blocks * BLOCK * SimulationSettings().kv_bytes_per_token)
    world.start("p1", role="prefill", **model, kv_copy_uses_min="2", kv_cache_bytes=small)
    world.start("d1", role="decode", **model)
    world.start("s1", **{**STORE, **model, "store_memory_bytes": STORE["store_files_bytes"]})
    full, prompts = PROMPT_TOKENS // BLOCK, [draw(seed) for seed in range(30, 37)]
    async with driver_of(world) as driver:

        def counted() -> KvExchangeState:
            return driver.tap.loads["p1"].exchange or KvExchangeState()

        # What was evicted before the worker knew a store is not lost to it.
        known = draw(29)
        for _use in range(2):
            await driver.leg("p1", LegKind.AGGREGATED, known)
        await driver.tap.until(lambda: counted().copied_blocks_total >= full, "the worker knows the store")
        for number, prompt in enumerate(prompts, 1):
            await driver.leg("p1", LegKind.AGGREGATED, prompt)
            due = full + max(0, number - PROMPTS_HELD) * full
            is_done = lambda due=due: counted().copied_blocks_total + counted().lost_blocks_total >= due  # noqa: E731
            await driver.tap.until(is_done, f"{due} blocks are copied or lost")
        evicted = prompts[: len(prompts) - PROMPTS_HELD - 1]
        held = [(await driver.fetch("s1", prompt)).held for prompt in evicted]
        assert sum(held) + counted().lost_blocks_total >= full * len(evicted), "what is lost is counted"
        assert sum(held) >= full
        assert (await driver.fetch("s1", prompts[-1])).held == 0, "it is far from being evicted"
        for prompt, blocks in zip(evicted, held, strict=True):
            assert await read(driver, prompt) == blocks * BLOCK
