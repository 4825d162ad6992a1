"""A store with an object store below its files: what files have evicted comes back, and a killed S3 server harms nothing
else.
"""

from __future__ import annotations

import signal
import time

import pytest

from services.worker.engines.store.records import BLOCK_BYTES_COUNTED_MIN
from shared.contracts.inference import LegKind
from tests.e2e.test_store import HASH_BYTES, PROMPT_TOKENS, StoreWorld, draw, read, snapshot, until_saved, world
from tests.nightly.objects.s3_server import Server, pytestmark, server
from tests.support.kv_driver import BLOCK, Driver
from tests.support.kv_world import driver_of

pytestmark = [*pytestmark, pytest.mark.nats]
__all__ = ("server", "world")

FULL = PROMPT_TOKENS // BLOCK
PROMPTS = 5
SAVED_S_MAX = 10.0
OBJECTS = {
    "role": "store",
    "store_memory_bytes": str(32 * BLOCK_BYTES_COUNTED_MIN),
    "store_files_bytes": str(2 * FULL * BLOCK_BYTES_COUNTED_MIN),
    "store_objects_bytes": str(64 << 20),
}


async def until_in_objects(driver: Driver, blocks: int) -> None:
    deadline = time.monotonic() + SAVED_S_MAX
    while len((found := await snapshot(driver)).object_hashes) < blocks * HASH_BYTES:
        assert time.monotonic() < deadline, (
            len(found.object_hashes) // 8,
            len(found.disk_hashes) // 8,
            len(found.host_hashes) // 8,
            blocks,
        )
        last = driver.tap.loads["s1"]
        await driver.tap.until(lambda last=last: driver.tap.loads["s1"] is not last, "the store reports")


async def test_conversations_come_back_from_objects_unless_their_server_is_gone(world: StoreWorld, server: Server):
    world.start("p1", role="prefill")
    world.start("d1", role="decode")
    world.start("s1", **OBJECTS, store_objects_url=f"{server.url}/blocks")
    prompts = [draw(seed) for seed in range(70, 70 + PROMPTS)]
    async with driver_of(world) as driver:
        for number, prompt in enumerate(prompts, 1):
            await driver.leg("p1", LegKind.AGGREGATED, prompt)
            await driver.fetch("s1", prompt, driver.source("p1"))
            await until_saved(driver, FULL * min(number, 2))
            await until_in_objects(driver, FULL * number)
        told = await snapshot(driver)
        assert len(told.disk_hashes) == 2 * FULL * HASH_BYTES
        assert await read(driver, prompts[0]) == FULL * BLOCK, "only objects had it"

    world.kill("s1")
    world.start("s1", **OBJECTS, store_objects_url=f"{server.url}/blocks")
    async with driver_of(world) as driver:
        await until_in_objects(driver, FULL * PROMPTS)
        assert await read(driver, prompts[1]) == FULL * BLOCK
        server.process.send_signal(signal.SIGKILL)
        assert await read(driver, prompts[2]) == 0
        assert await read(driver, prompts[1]) in {0, FULL * BLOCK}
        await driver.tap.until_settled("p1", "d1", "s1")
