"""A store of a model whose layers have windows."""

from __future__ import annotations

import pytest

from tests.e2e.test_store import World, prove_copies_survive, world

pytestmark = pytest.mark.nats
__all__ = ("world",)


async def test_copies_of_windows_survive_a_restart(world: World):
    await prove_copies_survive(world, "window")
