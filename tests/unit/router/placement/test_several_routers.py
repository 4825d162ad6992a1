"""Several routers place as well as one, because they publish their reservations."""

from __future__ import annotations

import asyncio

import pytest

from services.router.state.reservations import SILENT_S_MAX
from shared.contracts.channels import RESERVATIONS
from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.routers import ANNOUNCE_S, Reservation, Reservations
from tests.support.virtual_time import in_virtual_time, run_in_virtual_time
from tests.unit.router.replicas import Replicas, replicas
from tests.unit.router.world import settle

ROUTERS, WORKERS = 4, 8
GAP_S = 0.006
"""Between two requests; reservations are published at least every 5 ms."""
LONG = "word " * 800
"""A prompt long enough that a worker with one leg costs more than an idle one."""


async def burst(system: Replicas, requests: int) -> list[int]:
    """Send requests to each router in turn within one report period; returns the legs of each worker."""
    for number in range(requests):
        system.ask(system.routers[number % len(system.routers)], prompt=LONG)
        await asyncio.sleep(GAP_S)
    return system.legs()


def legs_after(routers: int, requests: int, *, loses_reservations: bool = False, busy: bool = False) -> list[int]:
    async def scenario() -> list[int]:
        async with replicas(routers, WORKERS, loses_reservations=loses_reservations) as system:
            if busy:  # all but the first
                for worker in system.workers[1:]:
                    await worker.report(waiting=4, waiting_tokens=8000, legs=4)
                await settle()
            return await burst(system, requests)

    return run_in_virtual_time(scenario())


@pytest.mark.parametrize("requests", [WORKERS, 2 * WORKERS])
def test_many_routers_spread_load_over_idle_workers_like_one(requests):
    alone = legs_after(1, requests)
    together = legs_after(ROUTERS, requests)

    assert max(alone) - min(alone) == 0
    assert max(together) - min(together) == 0


def test_without_reservations_all_routers_choose_the_same_workers():
    herded = legs_after(ROUTERS, WORKERS, loses_reservations=True)

    assert max(herded) == ROUTERS
    assert min(herded) == 0


def test_a_single_idle_worker_is_not_overloaded():
    alone = legs_after(1, 16, busy=True)[0]
    together = legs_after(ROUTERS, 16, busy=True)[0]
    herded = legs_after(ROUTERS, 16, busy=True, loses_reservations=True)[0]

    assert together == alone
    assert herded >= 2 * alone


@in_virtual_time
async def test_a_dead_routers_reservation_ends_with_the_next_worker_report():
    async with replicas(1, 2) as system:
        [router] = system.routers
        cluster, ghost = router.fleet.cluster, system.workers[0]
        one = Reservation(worker_id=WorkerId(ghost.worker_id), epoch=Epoch(ghost.epoch), legs=3, tokens=900)
        await ghost.bus.publish(RESERVATIONS, Reservations(router_id=RouterId("dead"), seq=1, made=[one]))
        await settle()
        assert cluster.workers[ghost.worker_id].legs == 3

        await asyncio.sleep(0.1)
        await system.report()

        assert cluster.workers[ghost.worker_id].legs == 0
        assert cluster.workers[ghost.worker_id].own.sent_tokens == 0


@in_virtual_time
async def test_a_reservation_for_an_earlier_epoch_is_ignored():
    async with replicas(1, 1) as system:
        [router], [worker] = system.routers, system.workers
        old = Reservation(worker_id=WorkerId(worker.worker_id), epoch=Epoch(worker.epoch - 1), legs=3)
        await worker.bus.publish(RESERVATIONS, Reservations(router_id=RouterId("r"), seq=1, made=[old]))
        await settle()

        assert router.fleet.cluster.workers[worker.worker_id].legs == 0


@in_virtual_time
async def test_a_single_router_publishes_only_announcements():
    async with replicas(1, WORKERS) as system:
        before = system.hub.reservations
        await burst(system, WORKERS)
        await asyncio.sleep(10 * ANNOUNCE_S)

        assert system.hub.reservations - before <= 11


@in_virtual_time
async def test_routers_discover_each_other_and_forget_departed_ones():
    async with replicas(3, 1) as system:
        books = [router.reservations.book for router in system.routers]
        assert [book.others for book in books] == [2, 2, 2]

        system.routers[0].bus.lose()
        await asyncio.sleep(SILENT_S_MAX + 2 * ANNOUNCE_S)

        assert [book.others for book in books] == [0, 1, 1]


@in_virtual_time
async def test_no_reservations_accumulate_while_nats_is_down():
    async with replicas(2, WORKERS) as system:
        one, other = system.routers
        one.bus.lose()
        await burst(system, 2 * WORKERS)
        await asyncio.sleep(0.1)
        published = system.hub.reservations
        one.bus.restore()
        await asyncio.sleep(2 * ANNOUNCE_S)

        assert one.reservations.book.message().made == []
        assert system.hub.reservations - published <= 4 + 2
        assert other.reservations.book.others == 1


@in_virtual_time
async def test_routers_starting_together_request_one_snapshot_per_worker_each():
    async with replicas(8, 4) as system:
        assert [router.kv.snapshots for router in system.routers] == [4] * 8

        for change in ("lose", "restore"):
            for router in system.routers:
                getattr(router.bus, change)()
        await asyncio.sleep(1.0)

        assert [router.kv.snapshots for router in system.routers] == [8] * 8
