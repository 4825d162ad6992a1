"""Kept values: revisions, expiry and watches."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.port import BusDown, StoredValue, WrongRevision
from shared.contracts.channels import LEADERSHIP
from shared.contracts.control import Leadership
from tests.integration.bus.worlds import SOON_S, soon

TTL_S = 1.0
RENEWED_TTL_S = 3.0
"""Longer than a machine stands still that is busy with other things."""
EXPIRED_S_MAX = 20.0
"""JetStream looks for expired values about once a second."""


def leader(name: str, *, role: str = "orchestrator", term: int = 1) -> Leadership:
    return Leadership(role=role, leader=name, term=term)


class Watcher:
    """A watch that a test reads step by step."""

    def __init__(self, kept) -> None:
        self._watch = kept.watch()

    async def next(self, seconds: float = SOON_S):
        async with asyncio.timeout(seconds):
            return await anext(self._watch)

    async def initial(self) -> dict[str, Leadership]:
        found = {}
        while (value := await self.next()) is not None:
            found[value.key] = value.value
        return found


async def test_a_value_is_kept_until_it_is_deleted(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)
    elsewhere = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)

    revision = await kept.put(leader("a"))

    assert await elsewhere.get("orchestrator") == StoredValue("orchestrator", leader("a"), revision)
    assert await elsewhere.all() == [StoredValue("orchestrator", leader("a"), revision)]
    await elsewhere.delete("orchestrator")
    assert await kept.get("orchestrator") is None
    assert await kept.all() == []


async def test_only_the_first_of_two_creators_succeeds(world):
    one = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)
    two = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)

    results = await asyncio.gather(one.create(leader("a")), two.create(leader("b")), return_exceptions=True)

    assert sorted(isinstance(result, WrongRevision) for result in results) == [False, True]


async def test_an_update_needs_the_newest_revision(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)
    first = await kept.create(leader("a"))

    second = await kept.update(leader("a", term=2), first)

    with pytest.raises(WrongRevision):
        await kept.update(leader("b"), first)
    assert await kept.get("orchestrator") == StoredValue("orchestrator", leader("a", term=2), second)


async def test_a_deleted_value_can_be_created_again(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)
    await kept.create(leader("a"))
    await kept.delete("orchestrator")

    await kept.create(leader("b"))

    assert (await kept.get("orchestrator")).value == leader("b")


async def test_a_watch_tells_what_is_there_then_none_then_changes(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)
    await kept.put(leader("a"))
    await kept.put(leader("gone", role="other"))
    await kept.delete("other")
    watcher = Watcher(await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None))

    assert await watcher.initial() == {"orchestrator": leader("a")}
    await kept.put(leader("b"))
    assert (await watcher.next()).value == leader("b")
    await kept.delete("orchestrator")
    gone = await watcher.next()
    assert (gone.key, gone.value) == ("orchestrator", None)


async def test_a_watch_of_nothing_says_none_at_once(world):
    watcher = Watcher(await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None))

    assert await watcher.next() is None


async def test_a_value_that_is_not_renewed_expires_and_watchers_are_told(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=TTL_S)
    watcher = Watcher(kept)
    assert await watcher.initial() == {}
    await kept.create(leader("a"))
    assert (await watcher.next()).value == leader("a")

    gone = await watcher.next(EXPIRED_S_MAX)

    assert (gone.key, gone.value) == ("orchestrator", None)
    assert await kept.get("orchestrator") is None
    assert await kept.all() == []
    await kept.create(leader("b", term=2))
    assert (await watcher.next()).value == leader("b", term=2)


async def test_renewing_keeps_a_value_alive_past_its_expiry(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=RENEWED_TTL_S)
    other = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=RENEWED_TTL_S)
    revision = await kept.create(leader("a"))
    await other.put(leader("short", role="other"))

    async with asyncio.timeout(EXPIRED_S_MAX):
        while await kept.get("other") is not None:
            revision = await kept.update(leader("a"), revision)
            await asyncio.sleep(RENEWED_TTL_S / 12)

    assert (await kept.get("orchestrator")).value == leader("a")


async def test_a_bucket_with_another_expiry_is_changed_not_refused(world):
    first = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=60.0)
    await first.put(leader("a"))

    second = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=120.0)

    assert (await second.get("orchestrator")).value == leader("a")


async def test_while_nats_is_away_kept_values_say_so_at_once(world):
    kept = await (await world.bus()).key_value_store(LEADERSHIP, ttl_s=None)

    async with world.outage():
        with pytest.raises(BusDown):
            await soon(kept.put(leader("a")))
        with pytest.raises(BusDown):
            await soon(kept.get("orchestrator"))


async def test_after_an_outage_a_watch_tells_everything_again_at_once(world):
    bus = await world.bus()
    kept = await bus.key_value_store(LEADERSHIP, ttl_s=None)
    await kept.put(leader("a"))
    watcher = Watcher(kept)
    assert await watcher.initial() == {"orchestrator": leader("a")}

    async with world.outage():
        pass

    assert await watcher.initial() == {"orchestrator": leader("a")}
    await kept.put(leader("b", term=2))
    assert (await watcher.next()).value == leader("b", term=2)


async def test_after_a_server_lost_its_storage_watchers_learn_what_vanished_and_writes_work(world):
    bus = await world.bus()
    kept = await bus.key_value_store(LEADERSHIP, ttl_s=None)
    await kept.put(leader("a"))
    watcher = Watcher(kept)
    await watcher.initial()

    async with world.outage(storage_lost=True):
        pass

    gone = await watcher.next()
    assert (gone.key, gone.value) == ("orchestrator", None)
    assert await watcher.next() is None
    await kept.create(leader("b"))
    assert (await watcher.next()).value == leader("b")
