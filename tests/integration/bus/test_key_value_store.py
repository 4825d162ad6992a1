"""Key-value stores: revisions, expiry and watches."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.port import BusDown, StoredValue, WrongRevision
from shared.contracts.channels import LEADERSHIP
from shared.contracts.control import Leadership
from tests.integration.bus.worlds import SOON_S, soon

TTL_S = 1.0
RENEWED_TTL_S = 3.0
"""Longer than a busy machine pauses this process."""
EXPIRED_S_MAX = 20.0
"""JetStream deletes expired entries about once a second."""


@pytest.fixture(autouse=True)
async def bucket(world):
    await make(world)


async def make(world, ttl_s: float | None = None) -> None:
    """As an orchestrator does."""
    await (await world.bus()).make_bucket(LEADERSHIP, ttl_s=ttl_s)


def leader(name: str, *, role: str = "orchestrator", term: int = 1) -> Leadership:
    return Leadership(role=role, leader=name, term=term)


class Watcher:
    """Reads a watch step by step."""

    def __init__(self, entries) -> None:
        self._watch = entries.watch()

    async def next(self, seconds: float = SOON_S):
        async with asyncio.timeout(seconds):
            return await anext(self._watch)

    async def initial(self) -> dict[str, Leadership]:
        found = {}
        while (value := await self.next()) is not None:
            found[value.key] = value.value
        return found


async def test_an_entry_exists_until_it_is_deleted(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    elsewhere = await (await world.bus()).key_value_store(LEADERSHIP)

    revision = await entries.put(leader("a"))

    assert await elsewhere.get("orchestrator") == StoredValue("orchestrator", leader("a"), revision)
    assert await elsewhere.all() == [StoredValue("orchestrator", leader("a"), revision)]
    await elsewhere.delete("orchestrator")
    assert await entries.get("orchestrator") is None
    assert await entries.all() == []


async def test_only_the_first_of_two_creators_succeeds(world):
    one = await (await world.bus()).key_value_store(LEADERSHIP)
    two = await (await world.bus()).key_value_store(LEADERSHIP)

    results = await asyncio.gather(one.create(leader("a")), two.create(leader("b")), return_exceptions=True)

    assert sorted(isinstance(result, WrongRevision) for result in results) == [False, True]


async def test_an_update_needs_the_newest_revision(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    first = await entries.create(leader("a"))

    second = await entries.update(leader("a", term=2), first)

    with pytest.raises(WrongRevision):
        await entries.update(leader("b"), first)
    assert await entries.get("orchestrator") == StoredValue("orchestrator", leader("a", term=2), second)


async def test_a_deleted_entry_can_be_created_again(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    await entries.create(leader("a"))
    await entries.delete("orchestrator")

    await entries.create(leader("b"))

    assert (await entries.get("orchestrator")).value == leader("b")


async def test_a_watch_yields_entries_then_none_then_changes(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    await entries.put(leader("a"))
    await entries.put(leader("gone", role="other"))
    await entries.delete("other")
    watcher = Watcher(await (await world.bus()).key_value_store(LEADERSHIP))

    assert await watcher.initial() == {"orchestrator": leader("a")}
    await entries.put(leader("b"))
    assert (await watcher.next()).value == leader("b")
    await entries.delete("orchestrator")
    gone = await watcher.next()
    assert (gone.key, gone.value) == ("orchestrator", None)


async def test_a_watch_of_an_empty_store_yields_none(world):
    watcher = Watcher(await (await world.bus()).key_value_store(LEADERSHIP))

    assert await watcher.next() is None


async def test_an_entry_that_is_not_renewed_expires_and_watches_report_it(world):
    await make(world, TTL_S)
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    watcher = Watcher(entries)
    assert await watcher.initial() == {}
    await entries.create(leader("a"))
    assert (await watcher.next()).value == leader("a")

    gone = await watcher.next(EXPIRED_S_MAX)

    assert (gone.key, gone.value) == ("orchestrator", None)
    assert await entries.get("orchestrator") is None
    assert await entries.all() == []
    await entries.create(leader("b", term=2))
    assert (await watcher.next()).value == leader("b", term=2)


async def test_a_renewed_entry_outlives_its_ttl(world):
    await make(world, RENEWED_TTL_S)
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    other = await (await world.bus()).key_value_store(LEADERSHIP)
    revision = await entries.create(leader("a"))
    await other.put(leader("short", role="other"))

    async with asyncio.timeout(EXPIRED_S_MAX):
        while await entries.get("other") is not None:
            revision = await entries.update(leader("a"), revision)
            await asyncio.sleep(RENEWED_TTL_S / 12)

    assert (await entries.get("orchestrator")).value == leader("a")


async def test_another_ttl_changes_a_bucket_and_keeps_its_entries(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    await make(world, 60.0)
    await entries.put(leader("a"))

    await make(world, 120.0)

    assert (await entries.get("orchestrator")).value == leader("a")


async def test_only_the_revision_that_is_named_is_deleted(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)
    first = await entries.put(leader("a"))
    second = await entries.put(leader("b"))

    with pytest.raises(WrongRevision):
        await entries.delete("orchestrator", first)
    assert (await entries.get("orchestrator")).value == leader("b")
    await entries.delete("orchestrator", second)
    assert await entries.get("orchestrator") is None


async def test_while_nats_is_down_entries_raise_bus_down_at_once(world):
    entries = await (await world.bus()).key_value_store(LEADERSHIP)

    async with world.outage():
        with pytest.raises(BusDown):
            await soon(entries.put(leader("a")))
        with pytest.raises(BusDown):
            await soon(entries.get("orchestrator"))


async def test_after_an_outage_a_watch_yields_all_entries_again(world):
    bus = await world.bus()
    entries = await bus.key_value_store(LEADERSHIP)
    await entries.put(leader("a"))
    watcher = Watcher(entries)
    assert await watcher.initial() == {"orchestrator": leader("a")}

    async with world.outage():
        pass

    assert await watcher.initial() == {"orchestrator": leader("a")}
    await entries.put(leader("b", term=2))
    assert (await watcher.next()).value == leader("b", term=2)


async def test_after_a_server_lost_its_storage_watches_report_deletions_and_writes_work(world):
    bus = await world.bus()
    entries = await bus.key_value_store(LEADERSHIP)
    await entries.put(leader("a"))
    watcher = Watcher(entries)
    await watcher.initial()

    async with world.outage(storage_lost=True):
        pass

    await make(world)
    gone = await watcher.next()
    assert (gone.key, gone.value) == ("orchestrator", None)
    assert await watcher.next() is None
    await entries.create(leader("b"))
    assert (await watcher.next()).value == leader("b")
