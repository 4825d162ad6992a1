"""Kept responses on a real NATS: larger than its largest message, bounded together, and there after its restart."""

from __future__ import annotations

import asyncio
import secrets

import msgspec
import pytest

from services.orchestrator.buckets import KeptFor, make_buckets
from services.router.responses.history import StoredResponse
from services.router.responses.response_store import NotKept, ResponseStore
from shared.bus.nats_bus import connect_nats
from shared.contracts.routers import entry_key
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

PAYLOAD_BYTES = 64 * 1024
ENTRY_BYTES = 200 * 1024
BUCKET_BYTES = 1024 * 1024
BYTES_MAX = 1024 * 1024
WAIT_S_MAX = 30.0


def entry(number: int) -> StoredResponse:
    """It cannot be compressed to less than half."""
    text = secrets.token_hex(ENTRY_BYTES // 2)
    return StoredResponse(response=msgspec.Raw(b'{"id":"%d"}' % number), items=[msgspec.Raw(msgspec.json.encode(text))])


async def read(store: ResponseStore, key: str) -> StoredResponse | None:
    """As soon as NATS can be asked."""
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            try:
                return await store.get(key)
            except NotKept:
                await asyncio.sleep(0.02)


async def test_entries_are_kept_through_a_restart_and_the_oldest_make_room(tmp_path):
    with NatsServer(tmp_path, max_payload=PAYLOAD_BYTES) as server:
        bus = await connect_nats(server.url, name="router")
        await make_buckets(bus, 5.0, KeptFor(responses_bytes_max=BUCKET_BYTES))
        store = ResponseStore(bus, BYTES_MAX)
        entries = {entry_key("", str(number)): entry(number) for number in range(15)}
        for key, one in entries.items():
            await store.put("", key, one)
        kept = [key for key in entries if await store.get(key) is not None]

        server.kill()
        server.start()
        newest = list(entries)[-1]
        again = await read(store, newest)

        assert kept == list(entries)[-len(kept) :]
        assert 5 <= len(kept) <= 10
        assert again is not None
        assert msgspec.json.encode(again) == msgspec.json.encode(entries[newest])
        assert await store.delete("", newest)
        assert await store.get(newest) is None
        await bus.close()


async def test_an_entry_expires(tmp_path):
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="router")
        await make_buckets(bus, 5.0, KeptFor(responses_s=1.0))
        store, key = ResponseStore(bus, BYTES_MAX), entry_key("", "1")
        await store.put("", key, entry(1))
        assert await store.get(key) is not None
        async with asyncio.timeout(WAIT_S_MAX):
            while await store.get(key) is not None:
                await asyncio.sleep(0.05)
        await bus.close()
