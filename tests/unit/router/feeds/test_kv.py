"""A router fetches the KV snapshots of a whole fleet."""

from __future__ import annotations

import asyncio

from services.router.feeds.kv import ASKS_AT_ONCE_MAX, SNAPSHOT_GAP_S, SNAPSHOT_GAP_S_MAX, KvFeed
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.bus.port import Envelope
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import (
    AskKvSnapshot,
    KvDigest,
    KvEvent,
    KvEventBatch,
    KvEventKind,
    KvSnapshot,
    pack_hashes,
    unpack_hashes,
)
from tests.support.builders import kv_batch
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import in_virtual_time

WORKERS = 5 * ASKS_AT_ONCE_MAX
ANSWER_S = 1.0
W1 = WorkerId("w1")


class Fleet:
    """Workers that respond slowly; one of them never responds."""

    silent = "w3"

    def __init__(self) -> None:
        self.asked = 0
        self.asked_at_once = 0

    async def answer(self, ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        self.asked += 1
        self.asked_at_once = max(self.asked_at_once, self.asked)
        await asyncio.sleep(1e6 if ask.worker_id == self.silent else ANSWER_S)
        self.asked -= 1
        hashes = pack_hashes([int(ask.worker_id[1:])])
        return KvSnapshot(worker_id=ask.worker_id, epoch=Epoch(1), seq=1, hashes=hashes)


@in_virtual_time
async def test_snapshots_are_requested_in_batches_and_silent_workers_block_none():
    hub, fleet, index = MemoryHub(), Fleet(), PrefixIndex()
    await MemoryBus(hub).answer(KV_SNAPSHOT, fleet.answer)
    feed = KvFeed(MemoryBus(hub), index)
    await feed.open()
    following = asyncio.create_task(feed.follow())

    for number in range(WORKERS):
        feed.worker_joined(WorkerId(f"w{number}"), Epoch(1))
    await asyncio.sleep(8 * ANSWER_S)

    assert fleet.asked_at_once == ASKS_AT_ONCE_MAX
    assert index.wanting() == [fleet.silent]
    assert {index.count(worker_id) for worker_id in index.entries} == {0, 1}
    assert index.state(WorkerId("w4")) is IndexState.EXACT
    following.cancel()


@in_virtual_time
async def test_an_older_process_of_a_worker_cannot_answer_for_the_newest():
    hub, index = MemoryHub(), PrefixIndex()
    older, newest = (KvSnapshot(worker_id=W1, epoch=Epoch(n), seq=n, hashes=pack_hashes([n])) for n in (1, 2))
    for snapshot in (older, newest):
        await answer_with(hub, snapshot)
    feed = KvFeed(MemoryBus(hub), index)
    following = asyncio.create_task(feed.follow())

    feed.worker_joined(W1, Epoch(2))
    await asyncio.sleep(SNAPSHOT_GAP_S / 2)

    assert index.state(W1) is IndexState.EXACT
    assert unpack_hashes(index.table.blocks(index.slot(W1), 0)) == (2,)
    assert feed.snapshots == 1
    following.cancel()


@in_virtual_time
async def test_a_new_epoch_is_asked_at_once_after_failures_of_the_earlier_one():
    hub, index = MemoryHub(), PrefixIndex()
    feed = KvFeed(MemoryBus(hub), index)
    following = asyncio.create_task(feed.follow())
    feed.worker_joined(W1, Epoch(1))
    await asyncio.sleep(10 * SNAPSHOT_GAP_S_MAX)
    assert index.state(W1) is IndexState.FALLBACK

    await answer_with(hub, KvSnapshot(worker_id=W1, epoch=Epoch(2), seq=1, hashes=pack_hashes([2])))
    feed.worker_joined(W1, Epoch(2))
    await asyncio.sleep(SNAPSHOT_GAP_S / 2)

    assert index.state(W1) is IndexState.EXACT
    following.cancel()


async def answer_with(hub: MemoryHub, snapshot: KvSnapshot) -> None:
    """A process of the worker that answers with this one."""

    async def answer(_ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        return snapshot

    ids = {"worker_id": snapshot.worker_id, "epoch": str(snapshot.epoch)}
    await MemoryBus(hub).answer(KV_SNAPSHOT, answer, **ids)


async def exact_feed() -> tuple[MemoryBus, KvFeed, PrefixIndex]:
    """The bus of worker w1, which holds nothing yet, and a router that knows it exactly."""
    hub, index = MemoryHub(), PrefixIndex()
    feed = KvFeed(MemoryBus(hub), index)
    await feed.open()
    feed.worker_joined(W1, Epoch(1))
    index.restore(KvSnapshot(worker_id=W1, epoch=Epoch(1), seq=0, hashes=b""))
    return MemoryBus(hub), feed, index


@in_virtual_time
async def test_the_last_batch_is_applied_without_a_next_one_and_before_a_digest_is_compared():
    worker, feed, index = await exact_feed()

    for seq in (1, 2, 3):
        await worker.publish(KV_EVENTS, kv_batch(seq, seq))
    await asyncio.sleep(0.1)
    assert index.count(W1) == 3

    feed._on_batch(kv_batch(4, 4), Envelope({}, 0))
    feed.check(W1, Epoch(1), KvDigest(seq=4, count=4, xor=1 ^ 2 ^ 3 ^ 4))
    assert index.count(W1) == 4
    assert index.state(W1) is IndexState.EXACT


@in_virtual_time
async def test_a_batch_that_cannot_be_read_costs_a_snapshot_and_nothing_else():
    worker, _feed, index = await exact_feed()
    torn = KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([2])[1:])
    await worker.publish(KV_EVENTS, kv_batch(1, 1))
    await worker.publish(KV_EVENTS, KvEventBatch(worker_id=W1, epoch=Epoch(1), seq=2, events=[torn]))
    await asyncio.sleep(0.1)

    assert index.count(W1) == 1
    assert index.wanting() == [W1]
