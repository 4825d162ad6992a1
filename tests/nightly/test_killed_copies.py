"""A worker that evicts, its store, or both are killed in the middle of a copy."""

from __future__ import annotations

import os
import signal

import pytest

from services.worker.engines.simulated.core.settings import SimulationSettings
from shared.contracts.inference import LegKind
from tests.e2e.test_store import BLOCK, ENGINE_BLOCKS, PROMPT_TOKENS, PROMPTS_HELD, STORE, StoreWorld, draw, read, world
from tests.support.kv_world import driver_of

pytestmark = pytest.mark.nats
__all__ = ("world",)

SMALL = {
    "kv_copy_uses_min": "2",
    "kv_cache_bytes": str(ENGINE_BLOCKS * BLOCK * SimulationSettings().kv_bytes_per_token),
}
SETTLED_S_MAX = 90.0
"""A lease of a killed reader ends within a minute."""


@pytest.mark.parametrize("killed", [("p1",), ("s1",), ("p1", "s1")], ids=" and ".join)
async def test_answers_stay_right_and_no_block_stays_pinned(world: StoreWorld, killed: tuple[str, ...]):
    settings = {"p1": {"role": "prefill", **SMALL}, "s1": STORE}
    world.start("d1", role="decode")
    for name, of_one in settings.items():
        world.start(name, **of_one)
    prompts = [draw(seed) for seed in range(40, 41 + PROMPTS_HELD)]
    async with driver_of(world) as driver:
        expected = [await driver.alone("d1", prompt) for prompt in prompts]
        for prompt in prompts[:-1]:
            assert (await driver.leg("p1", LegKind.AGGREGATED, prompt)).failure is None
        await driver.tap.until_settled("p1", "s1")
        await driver.leg("p1", LegKind.AGGREGATED, prompts[-1])
        before = len(driver.tap.leases)

        def kill_at_the_next_lease() -> bool:
            """As the message passes: the grant has not come back yet."""
            if len(driver.tap.leases) == before:
                return False
            for name in killed:
                os.kill(world.workers[name].process.pid, signal.SIGKILL)
            return True

        await driver.tap.until(kill_at_the_next_lease, "the store asks for the next blocks")
        world.kill(*killed)

    for name in killed:
        world.start(name, **settings[name])
    async with driver_of(world) as driver:
        await driver.tap.until_settled("p1", "s1", s_max=SETTLED_S_MAX)
        for prompt, tokens in zip(prompts, expected, strict=True):
            held = (await driver.fetch("s1", prompt)).held
            assert await driver.alone("p1", prompt) == tokens
            assert await read(driver, prompt) == held * BLOCK <= PROMPT_TOKENS
        await driver.tap.until_settled("p1", "d1", "s1", s_max=SETTLED_S_MAX)
        state = driver.tap.loads["s1"].store
        assert state is not None
        assert state.damaged_blocks_total == 0
        assert state.host_blocks * state.block_bytes <= int(STORE["store_memory_bytes"])
