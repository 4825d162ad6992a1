"""Entries of kept responses: stored in parts that NATS takes, read whole or not at all."""

from __future__ import annotations

import asyncio
import secrets

import msgspec
import pytest

from services.router.responses.history import StoredResponse
from services.router.responses.response_store import NotKept, ResponseStore, TenantShares
from shared.bus.jetstream import VALUE_BYTES_MAX
from shared.contracts.channels import RESPONSES
from shared.contracts.routers import PART_BYTES, entry_key
from tests.support.memory_bus import MemoryBus, MemoryHub

KEY = entry_key("acme", "resp_1")
BYTES_MAX = 1024 * 1024


def entry(size: int = 10) -> StoredResponse:
    """With so many bytes that cannot be compressed to less than half."""
    text = secrets.token_hex(size // 2)
    return StoredResponse(response=msgspec.Raw(b'{"id":"resp_1"}'), items=[msgspec.Raw(msgspec.json.encode(text))])


def values(hub: MemoryHub) -> dict[str, bytes]:
    return {key: stored.payload for key, stored in hub.buckets["responses"].values.items()}


def same(one: StoredResponse | None, other: StoredResponse) -> bool:
    return one is not None and msgspec.json.encode(one) == msgspec.json.encode(other)


@pytest.mark.parametrize("size", [10, 8 * PART_BYTES])
def test_what_is_put_is_read_and_deleted_whole(size: int):
    async def scenario() -> None:
        hub = MemoryHub()
        store, kept = ResponseStore(MemoryBus(hub), BYTES_MAX), entry(size)

        await store.put("acme", KEY, kept)

        assert all(len(payload) <= VALUE_BYTES_MAX for payload in values(hub).values())
        assert len(values(hub)) > size // (2 * PART_BYTES)
        assert same(await ResponseStore(MemoryBus(hub), BYTES_MAX).get(KEY), kept)
        assert await store.get(entry_key("other", "resp_1")) is None
        assert await store.delete("acme", KEY)
        assert not values(hub)
        assert not await store.delete("acme", KEY)
        assert await store.get(KEY) is None

    asyncio.run(scenario())


def test_an_entry_of_which_a_part_is_gone_or_of_another_version_is_not_there():
    async def scenario() -> None:
        hub = MemoryHub()
        bus = MemoryBus(hub)
        store, parts = ResponseStore(bus, BYTES_MAX), await bus.key_value_store(RESPONSES)
        await store.put("acme", KEY, entry(8 * PART_BYTES))
        second = (await parts.get(f"{KEY}-1")).value

        await parts.put(msgspec.structs.replace(second, version="another"))
        assert await store.get(KEY) is None
        await parts.put(second)
        assert await store.get(KEY) is not None
        await parts.delete(f"{KEY}-1")
        assert await store.get(KEY) is None

    asyncio.run(scenario())


def test_an_entry_that_is_too_large_or_unreadable_is_an_error():
    async def scenario() -> None:
        hub = MemoryHub()
        bus = MemoryBus(hub)
        large = entry(4 * PART_BYTES)
        with pytest.raises(NotKept, match="at most 4096"):
            await ResponseStore(bus, 4096).put("acme", KEY, large)
        assert not values(hub)

        await ResponseStore(bus, BYTES_MAX).put("acme", KEY, large)
        with pytest.raises(NotKept, match="cannot be read"):
            await ResponseStore(bus, 4096).get(KEY)
        bus.lose()
        with pytest.raises(NotKept) as lost:
            await ResponseStore(bus, BYTES_MAX).get(KEY)
        assert lost.value.passes

    asyncio.run(scenario())


def test_no_two_pairs_of_tenant_and_id_have_one_key():
    pairs = [("", "ab"), ("a", "b"), ("ab", ""), ("a", "\ud800"), ("b", "a")]
    assert len({entry_key(*pair) for pair in pairs}) == len(pairs)


def test_a_tenants_oldest_responses_go_when_its_share_is_full():
    async def scenario() -> None:
        hub = MemoryHub()
        store = ResponseStore(MemoryBus(hub), BYTES_MAX, 2 * PART_BYTES)
        keys = {who: [entry_key(who, str(number)) for number in range(9)] for who in ("acme", "other", "")}

        for number in range(9):
            for who in ("acme", ""):
                await store.put(who, keys[who][number], entry(PART_BYTES))
        await store.put("other", keys["other"][0], entry(PART_BYTES))

        async def kept(who: str) -> list[int]:
            return [number for number, key in enumerate(keys[who]) if await store.get(key) is not None]

        newest = await kept("acme")
        assert 1 <= len(newest) < 9
        assert newest[-1] == 8
        assert await kept("other") == [0]
        assert len(await kept("")) == 9  # Without keys there is one tenant, which has all the room.
        assert await store.delete("acme", keys["acme"][8])
        assert await kept("acme") == newest[:-1]

    asyncio.run(scenario())


def test_a_response_that_is_written_again_counts_once():
    shares = TenantShares(10)

    assert shares.stored("acme", "a", 4) == []
    assert shares.stored("acme", "b", 4) == []
    assert shares.stored("acme", "a", 5) == []
    assert shares.stored("acme", "c", 4) == ["b"]
    shares.removed("acme", "a")
    assert shares.stored("acme", "d", 6) == []
    assert shares.stored("acme", "e", 99) == ["c", "d"]
