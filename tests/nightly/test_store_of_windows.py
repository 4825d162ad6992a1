"""A store of a model whose layers have windows, or recurrent states."""

from __future__ import annotations

import pytest

from tests.e2e.test_store import (
    ENGINE_BLOCKS,
    PROMPTS_HELD,
    StoreWorld,
    prove_copies_survive,
    prove_evicted_are_copied,
    world,
)

pytestmark = pytest.mark.nats
__all__ = ("world",)


async def test_copies_of_windows_survive_a_restart(world: StoreWorld):
    await prove_copies_survive(world, "window")


@pytest.mark.parametrize(
    ("groups", "engine_blocks"), [("window", 6 * ENGINE_BLOCKS), ("state", ENGINE_BLOCKS + 3 * PROMPTS_HELD)]
)
async def test_workers_copy_to_a_store_what_they_evict(world: StoreWorld, groups: str, engine_blocks: int):
    await prove_evicted_are_copied(world, groups, engine_blocks)
