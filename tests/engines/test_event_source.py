"""The reader of vLLM's KV events against Baton's publisher and vLLM's: no event is missed, or the loss is reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.worker.engines.vllm.arguments import OWN_EVENT_PUBLISHER
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, unpack_hashes

pytestmark = pytest.mark.vllm

WAIT_S_MAX = 60.0


def full(block: int) -> bytes:
    return block.to_bytes(8, "big") + bytes(24)


class Publisher:
    """A publisher, with block numbers for events."""

    def __init__(self, name: str, source, buffer_steps: int) -> None:
        from vllm.config.kv_events import KVEventsConfig
        from vllm.distributed.kv_events import EventPublisherFactory

        from connector.scheduler.event_publisher import register_publisher

        register_publisher()
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=source.endpoint,
            replay_endpoint=source.replay_endpoint,
            buffer_steps=buffer_steps,
        )
        config.publisher = name
        self.inner = EventPublisherFactory.create(config)

    def stored(self, block: int, medium: str = "GPU", locality: str | None = None) -> None:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        event = BlockStored(
            block_hashes=[full(block)],
            parent_block_hash=None,
            token_ids=[],
            block_size=32,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality=locality,
        )
        self.inner.publish(KVEventBatch(ts=time.time(), events=[event]))


@pytest.fixture(params=["zmq", OWN_EVENT_PUBLISHER], ids=["vLLM's publisher", "Baton's publisher"])
def publisher_name(request) -> str:
    return request.param


@contextmanager
def source_and_publisher(run_dir: Path, name: str, missed: int, buffer_steps: int) -> Iterator:
    """A source that begins to listen when ``missed`` batches have been published."""
    from services.worker.engines.vllm.kv_events import KvEventSource

    source = KvEventSource(run_dir)
    source._socket.disconnect(source.endpoint)
    publisher = Publisher(name, source, buffer_steps)
    for block in range(missed):
        publisher.stored(block)
    while publisher.inner._event_queue.unfinished_tasks:
        time.sleep(0.01)  # vLLM's thread says nothing when it is done
    source._socket.connect(source.endpoint)
    try:
        yield source, publisher
    finally:
        source.close()
        publisher.inner.shutdown()


async def events_after(source, publisher, count: int = 1) -> list[KvEvent]:
    """What the source tells when more is published, ``count`` or more; the first may come before the connection stands."""
    batches = source.batches()
    events: list[KvEvent] = []
    async with asyncio.timeout(WAIT_S_MAX):
        while len(events) < count:
            following = asyncio.ensure_future(anext(batches))
            while not following.done():
                publisher.stored(1000)
                await asyncio.wait([following], timeout=0.1)
            events += following.result()
    await batches.aclose()
    return events


async def test_events_before_the_subscription_are_replayed(tmp_path, publisher_name):
    with source_and_publisher(tmp_path, publisher_name, missed=3, buffer_steps=100) as (source, publisher):
        events = await events_after(source, publisher)

    assert [unpack_hashes(event.hashes)[0] for event in events][:4] == [0, 1, 2, 1000]


async def test_events_name_the_tier_and_shared_store_blocks_are_ignored(tmp_path, publisher_name):
    with source_and_publisher(tmp_path, publisher_name, missed=0, buffer_steps=100) as (source, publisher):
        publisher.stored(1, "CPU")
        publisher.stored(2, "STORAGE")
        publisher.stored(3, "STORAGE", "REMOTE")
        events = await events_after(source, publisher, count=3)

    assert [(unpack_hashes(event.hashes)[0], event.tier) for event in events][:3] == [
        (1, KvTier.HOST),
        (2, KvTier.DISK),
        (1000, KvTier.DEVICE),
    ]


async def test_what_can_no_longer_be_replayed_clears_everything(tmp_path, publisher_name):
    with source_and_publisher(tmp_path, publisher_name, missed=5, buffer_steps=2) as (source, publisher):
        events = await events_after(source, publisher)

    assert events[0].kind is KvEventKind.CLEARED
    assert unpack_hashes(events[-1].hashes) == (1000,)


async def test_events_that_are_published_during_a_replay_are_not_lost(tmp_path, publisher_name):
    missed, wanted = 500, 600
    with source_and_publisher(tmp_path, publisher_name, missed=missed, buffer_steps=10_000) as (source, publisher):
        batches, blocks, published = source.batches(), list[int](), missed
        async with asyncio.timeout(WAIT_S_MAX):
            while len(blocks) < wanted:
                following = asyncio.ensure_future(anext(batches))
                while not following.done():
                    publisher.stored(published)
                    published += 1
                    await asyncio.wait([following], timeout=0.001)
                blocks += [unpack_hashes(event.hashes)[0] for event in following.result()]
        await batches.aclose()

    assert blocks == list(range(len(blocks)))


def test_an_ended_publisher_takes_no_events_and_leaves_no_thread(tmp_path):
    with source_and_publisher(tmp_path, OWN_EVENT_PUBLISHER, missed=1, buffer_steps=2) as (_source, publisher):
        publisher.inner.shutdown()

        assert not publisher.inner._thread.is_alive()
        with pytest.raises(RuntimeError, match="closed"):
            publisher.stored(2)
