"""A record belongs to one process: the one that began last."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.worker.lifecycle.registration import IdTaken, Registration
from shared.contracts.channels import WORKER_RECORDS
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryBus, MemoryHub

OLD, NEW = record("w1", epoch=1), record("w1", epoch=2)


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


async def registered(hub: MemoryHub):
    found = await (await MemoryBus(hub).key_value_store(WORKER_RECORDS)).get("w1")
    return found and found.value


async def test_a_record_of_a_later_process_ends_the_earlier_one_and_stays(hub):
    old, new = Registration(MemoryBus(hub), OLD), Registration(MemoryBus(hub), NEW)
    await old.update(OLD)
    await new.update(NEW)

    with pytest.raises(IdTaken, match="began later"):
        await old.update(msgspec.structs.replace(OLD, note="changed"))
    await old.remove()
    await old.update(OLD)

    assert await registered(hub) == NEW


async def test_a_record_of_an_earlier_process_is_overwritten(hub):
    old, new = Registration(MemoryBus(hub), OLD), Registration(MemoryBus(hub), NEW)
    await new.update(NEW)
    await old.update(OLD)

    await new.update(NEW)

    assert await registered(hub) == NEW
    with pytest.raises(IdTaken):
        await old.update(OLD)


async def test_of_two_that_began_in_the_same_millisecond_one_remains(hub):
    twins = [msgspec.structs.replace(OLD, pid=pid) for pid in (7, 8)]
    first, second = (Registration(MemoryBus(hub), twin) for twin in twins)
    await second.update(twins[1])
    await first.update(twins[0])

    await second.update(twins[1])
    with pytest.raises(IdTaken, match="pid 8"):
        await first.update(twins[0])


async def test_a_record_that_expired_or_was_lost_is_written_again(hub):
    registration = Registration(MemoryBus(hub), OLD)
    await registration.update(OLD)
    await (await MemoryBus(hub).key_value_store(WORKER_RECORDS)).delete("w1")

    await registration.update(OLD)

    assert await registered(hub) == OLD


async def test_following_raises(hub):
    old, new = Registration(MemoryBus(hub), OLD), Registration(MemoryBus(hub), NEW)
    await old.update(OLD)
    await new.update(NEW)

    with pytest.raises(IdTaken):
        async with asyncio.timeout(30.0):
            await old.follow()
