"""Each process of a worker has a greater epoch than the one before, even if the clock was set back."""

from __future__ import annotations

import pytest

from services.worker.lifecycle.registration import EPOCH_MAX, new_epoch
from shared.bus.port import Bus
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import WorkerId
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryBus, MemoryHub

W1 = WorkerId("w1")
BEFORE = 5000


@pytest.fixture
async def bus() -> Bus:
    return MemoryBus(MemoryHub())


async def test_the_first_epoch_is_the_wall_clock(bus):
    assert await new_epoch(bus, W1, 4000) == 4000


@pytest.mark.parametrize(("wall_ms", "epoch"), [(6000, 6000), (BEFORE, BEFORE + 1), (10, BEFORE + 1)])
async def test_an_epoch_is_greater_than_the_registered_one(bus, wall_ms, epoch):
    records = await bus.key_value_store(WORKER_RECORDS)
    await records.put(record(W1, epoch=BEFORE))

    assert await new_epoch(bus, W1, wall_ms) == epoch


@pytest.mark.parametrize("forged", [EPOCH_MAX + 1, 2**64 - 1])
async def test_an_impossible_epoch_in_the_registry_is_ignored(bus, forged):
    records = await bus.key_value_store(WORKER_RECORDS)
    await records.put(record(W1, epoch=forged))

    assert await new_epoch(bus, W1, 10) == 10


async def test_a_removed_record_does_not_bind_the_next_epoch(bus):
    records = await bus.key_value_store(WORKER_RECORDS)
    await records.put(record(W1, epoch=BEFORE))
    await records.delete(W1)

    assert await new_epoch(bus, W1, 10) == 10
