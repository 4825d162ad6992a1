"""After lost messages and restarts the router's index again equals the engines' caches, block by block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.bus.worlds import NatsWorld
from tests.integration.router.told_workers import LOST_SHARE, ToldFleet
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

WORKERS = 6
STEPS = 300


@asynccontextmanager
async def fleet_on_nats(directory: Path, lost_share: float = 0.0) -> AsyncIterator[ToldFleet]:
    with NatsServer(directory, has_buckets=True) as server:
        world = NatsWorld(server)
        fleet = ToldFleet(world, lost_share)
        await fleet.start_router()
        for number in range(WORKERS):
            await fleet.start_worker(f"w{number}")
        try:
            yield fleet
        finally:
            await fleet.close()
            await world.close()


async def test_every_lost_batch_of_events_is_detected(tmp_path):
    async with fleet_on_nats(tmp_path, LOST_SHARE) as fleet:
        await fleet.live(10)
        await fleet.settled()
        asked = fleet.router.kv.snapshots

        await fleet.live(STEPS)
        await fleet.settled()

        assert fleet.lost > 5
        assert fleet.router.kv.snapshots > asked
        fleet.assert_matches_are_true()


async def test_restarted_workers_are_indexed_by_their_present_blocks(tmp_path):
    async with fleet_on_nats(tmp_path) as fleet:
        living = asyncio.gather(*(worker.live(STEPS) for worker in fleet.workers.values()))
        await fleet.workers["w0"].live(STEPS // 3)
        for worker_id in ("w0", "w1"):
            await fleet.start_worker(worker_id, epoch=2)
        await asyncio.gather(fleet.workers["w0"].live(STEPS // 3), living)
        await fleet.settled()

        assert fleet.index.count("w1") == 0
        assert fleet.index.count("w0") > 0
        fleet.assert_matches_are_true()


async def test_a_router_that_begins_anew_learns_everything_from_snapshots(tmp_path):
    async with fleet_on_nats(tmp_path) as fleet:
        living = asyncio.gather(*(worker.live(STEPS) for worker in fleet.workers.values()))
        await fleet.workers["w0"].live(STEPS // 3)
        before = fleet.router
        await fleet.start_router()
        await living
        await fleet.settled()

        assert fleet.router is not before
        assert fleet.router.kv.snapshots >= WORKERS
        fleet.assert_matches_are_true()


@pytest.mark.parametrize("storage_lost", [False, True], ids=["", "with its storage lost"])
async def test_the_index_is_exact_after_a_nats_outage(tmp_path, storage_lost):
    async with fleet_on_nats(tmp_path) as fleet:
        await fleet.live(10)
        await fleet.settled()
        asked = fleet.router.kv.snapshots

        living = asyncio.gather(*(worker.live(STEPS) for worker in fleet.workers.values()))
        async with fleet.world.outage(storage_lost=storage_lost):
            await fleet.workers["w0"].live(STEPS // 3)
        await living
        await fleet.settled()

        assert fleet.router.kv.snapshots >= asked + WORKERS
        fleet.assert_matches_are_true()


async def test_all_of_it_at_once(tmp_path):
    async with fleet_on_nats(tmp_path, LOST_SHARE) as fleet:
        living = asyncio.gather(*(worker.live(2 * STEPS) for worker in fleet.workers.values()))
        await fleet.start_worker("w0", epoch=2)
        async with fleet.world.outage():
            await fleet.workers["w0"].live(STEPS // 3)
        await fleet.start_router()
        await fleet.start_worker("w0", epoch=3)
        await fleet.workers["w0"].live(STEPS // 3)
        await living
        await fleet.settled()

        assert fleet.lost > 5
        fleet.assert_matches_are_true()
