"""The KV event feed: all events in order, or the whole cache again."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engines.port import KV_EVENTS_MAX, EngineDead, KvEventFeed
from shared.contracts.kv_events import KvEvent, KvEventKind, pack_hashes

WHOLE = [KvEvent(kind=KvEventKind.CLEARED), KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([99]))]


def stored(block: int) -> KvEvent:
    return KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([block]))


@pytest.fixture
async def died() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


@pytest.fixture
async def feed(died: asyncio.Future[str]) -> KvEventFeed:
    return KvEventFeed(died, lambda: list(WHOLE))


async def test_events_before_the_first_read_come_in_one_batch(feed: KvEventFeed):
    feed.tell([stored(1)])
    feed.tell([stored(2), stored(3)])
    following = feed.batches()

    assert await anext(following) == [stored(1), stored(2), stored(3)]

    feed.tell([stored(4)])
    assert await anext(following) == [stored(4)]


async def test_an_empty_list_of_events_wakes_no_reader(feed: KvEventFeed):
    following = asyncio.ensure_future(anext(feed.batches()))
    feed.tell([])
    await asyncio.sleep(0)
    feed.tell([stored(1)])

    assert await following == [stored(1)]


async def test_a_reader_too_far_behind_gets_the_whole_cache(feed: KvEventFeed):
    for block in range(KV_EVENTS_MAX):
        feed.tell([stored(block)])
    feed.tell([stored(KV_EVENTS_MAX)])
    feed.tell([stored(1)])

    assert await anext(feed.batches()) == [*WHOLE, stored(1)]


async def test_a_reader_learns_why_the_engine_died(feed: KvEventFeed, died: asyncio.Future[str]):
    following = asyncio.ensure_future(anext(feed.batches()))
    await asyncio.sleep(0)

    died.set_result("it fell over")

    with pytest.raises(EngineDead, match="it fell over"):
        await following
