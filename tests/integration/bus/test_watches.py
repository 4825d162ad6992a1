"""How a watch merges stored values with published changes, on a real nats-server, and which party makes the bucket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping

import pytest

from shared.bus.jetstream import MESSAGE_BYTES_MAX, VALUE_BYTES_MAX, settings_of, stream_config
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_kv_store import NatsKeyValueStore
from shared.bus.nats_reader import Take
from shared.bus.port import BusDown, MessageTooLarge, Subscription
from shared.contracts.channels import LEADERSHIP
from tests.integration.bus.test_key_value_store import EXPIRED_S_MAX, Watcher, leader, make
from tests.integration.bus.worlds import SOON_S, make_world, soon

pytestmark = pytest.mark.nats

TTL_S = 1.0
KEYS = 1000


@pytest.fixture
async def world(tmp_path):
    async with make_world("nats", tmp_path) as made:
        yield made


class Between:
    """A bus on which something happens after each reply of JetStream, before the reader has it."""

    def __init__(self, bus: NatsBus, happens: Callable[[str], Awaitable[None]]) -> None:
        self._happens = happens
        self._bus = bus
        self.counts, self.reconnected = bus.counts, bus.reconnected

    @property
    def connected(self) -> bool:
        return self._bus.connected

    async def listen(self, subject: str, take: Take) -> Subscription:
        return await self._bus.listen(subject, take)

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> bytes:
        reply = await self._bus.request(subject, payload, headers, timeout_s)
        await self._happens(subject)
        return reply


class Deaf(Between):
    """Hears of no stored value, like a process that stood still and has not read its socket yet."""

    async def listen(self, subject: str, take: Take) -> Subscription:
        return await super().listen(subject, lambda *_message: None)


async def nothing(_subject: str) -> None: ...


async def api(world, verb: str, body: object = None) -> dict:
    bus = await world.bus()
    return json.loads(await bus.request(f"$JS.API.{verb}", json.dumps(body).encode() if body else b"", None, SOON_S))


async def test_no_change_during_the_first_read_is_lost_or_undone(world):
    await make(world)
    writer = await (await world.bus()).key_value_store(LEADERSHIP)
    await writer.put(leader("old", role="changed"))
    await writer.put(leader("old", role="deleted"))
    pending = [
        lambda: writer.put(leader("new", role="changed")),
        lambda: writer.put(leader("new", role="made")),
        lambda: writer.delete("deleted"),
    ]

    async def happens(_subject: str) -> None:
        if pending:
            await pending.pop()()

    reader = NatsKeyValueStore(Between(await world.bus(), happens), LEADERSHIP)
    watcher = Watcher(reader)

    found = await watcher.initial()

    assert not pending
    while found != {"changed": leader("new", role="changed"), "made": leader("new", role="made")}:
        change = await watcher.next()
        found[change.key] = change.value
        found = {key: value for key, value in found.items() if value is not None}
    await writer.put(leader("last", role="made"))
    assert (await watcher.next()).value == leader("last", role="made")


async def test_a_thousand_entries_are_read_and_their_changes_arrive_in_order(world):
    await make(world)
    writer = await (await world.bus()).key_value_store(LEADERSHIP)
    for first in range(0, KEYS, 100):
        await asyncio.gather(*(writer.put(leader("a", role=f"k{n}")) for n in range(first, first + 100)))
    watcher = Watcher(await (await world.bus()).key_value_store(LEADERSHIP))

    assert await watcher.initial() == {f"k{n}": leader("a", role=f"k{n}") for n in range(KEYS)}
    assert len(await writer.all()) == KEYS
    revisions = [await writer.put(leader("b", role=f"k{n}", term=n)) for n in range(100)]
    assert [(await watcher.next()).revision for _ in revisions] == revisions


async def test_a_value_that_expires_while_nats_is_away_is_gone_after_it(world):
    await make(world, TTL_S)
    writer = await (await world.bus()).key_value_store(LEADERSHIP)
    await writer.put(leader("a"))
    watcher = Watcher(writer)
    assert await watcher.initial() == {"orchestrator": leader("a")}

    async with world.outage():
        await asyncio.sleep(TTL_S)  # the entry's whole life
    await make(world, TTL_S)  # as an orchestrator does: values that expire are in the server's memory only
    gone = await watcher.next(EXPIRED_S_MAX)

    assert (gone.key, gone.value) == ("orchestrator", None)


async def test_a_value_read_late_in_its_life_expires_with_it(world):
    await make(world, 2 * TTL_S)
    writer = await (await world.bus()).key_value_store(LEADERSHIP)
    await writer.put(leader("a"))
    await asyncio.sleep(TTL_S)  # half of the entry's life
    watcher = Watcher(writer)
    began = asyncio.get_running_loop().time()
    await watcher.initial()

    assert (await watcher.next(EXPIRED_S_MAX)).value is None
    assert asyncio.get_running_loop().time() - began < 1.9 * TTL_S


async def test_a_reader_that_stood_still_asks_the_server_before_it_reports_an_expiry(world):
    await make(world, TTL_S)
    watcher = Watcher(NatsKeyValueStore(Deaf(await world.bus(), nothing), LEADERSHIP))
    writer = await (await world.bus()).key_value_store(LEADERSHIP)
    await writer.put(leader("a"))
    assert await watcher.initial() == {"orchestrator": leader("a")}

    async with asyncio.timeout(SOON_S):
        renewing = asyncio.ensure_future(renew(writer))
        change = await watcher.next()
        renewing.cancel()

    assert change.value is not None
    assert change.value.term > 1


async def renew(writer) -> None:
    term = 1
    while True:
        term += 1
        await writer.put(leader("a", term=term))
        await asyncio.sleep(TTL_S / 5)


async def test_a_bucket_that_was_made_anew_is_read_again(world):
    await make(world)
    writer = await (await world.bus()).key_value_store(LEADERSHIP)
    for term in range(5):
        await writer.put(leader("a", term=term))
    watcher = Watcher(writer)
    await watcher.initial()

    assert (await api(world, "STREAM.DELETE.KV_leaders"))["success"]
    await make(world)
    await writer.put(leader("b"))

    assert (await watcher.next()).value == leader("b")
    assert await watcher.next() is None


async def test_until_an_orchestrator_has_made_the_bucket_it_is_waited_for(world):
    bus = await world.bus()

    with pytest.raises(BusDown, match="the bucket leaders does not exist yet: an orchestrator makes it"):
        await bus.key_value_store(LEADERSHIP)
    store = NatsKeyValueStore(bus, LEADERSHIP)
    with pytest.raises(BusDown, match="an orchestrator"):
        await store.put(leader("a"))
    watcher = Watcher(store)
    first = asyncio.ensure_future(watcher.next())
    await asyncio.sleep(0)
    await make(world)

    assert await soon(first) is None
    await store.put(leader("a"))
    assert (await watcher.next()).value == leader("a")


@pytest.mark.parametrize(
    "change",
    [
        {"subjects": ["$KV.leaders.*", "leg.*.start"]},
        {"republish": {"src": "$KV.leaders.*", "dest": "worker.w1.{{wildcard(1)}}"}},
        {"sealed": True},
        {
            "max_msgs_per_subject": 64,
            "allow_msg_ttl": True,
            "allow_rollup_hdrs": True,
            "deny_delete": False,
            "deny_purge": False,
        },
        {"allow_direct": True, "max_msg_size": 10 * MESSAGE_BYTES_MAX},
    ],
    ids=["subjects", "republish", "sealed", "earlier version", "direct reads"],
)
async def test_a_bucket_with_another_configuration_is_put_right(world, change):
    wanted = stream_config("leaders", None)
    other = {**wanted, **change}
    sealed = other.pop("sealed", False)
    assert "error" not in await api(world, "STREAM.CREATE.KV_leaders", other)
    if sealed:
        assert "error" not in await api(world, "STREAM.UPDATE.KV_leaders", {**other, "sealed": True})

    await make(world)

    assert settings_of((await api(world, "STREAM.INFO.KV_leaders"))["config"]) == settings_of(wanted)
    store = await (await world.bus()).key_value_store(LEADERSHIP)
    await store.put(leader("a"))
    created = (await api(world, "STREAM.INFO.KV_leaders"))["created"]
    await make(world)
    assert (await api(world, "STREAM.INFO.KV_leaders"))["created"] == created


async def test_a_value_is_bounded(world):
    await make(world)
    store = await (await world.bus()).key_value_store(LEADERSHIP)

    with pytest.raises(MessageTooLarge):
        await store.put(leader("x" * VALUE_BYTES_MAX))
    assert await store.all() == []
