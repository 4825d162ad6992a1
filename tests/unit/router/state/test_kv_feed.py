"""A router fetches the KV snapshots of a whole fleet."""

from __future__ import annotations

import asyncio

from services.router.state.feeds import ASKS_AT_ONCE_MAX, KvFeed
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.bus.port import Envelope
from shared.contracts.channels import KV_SNAPSHOT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot, pack_hashes
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import in_virtual_time

WORKERS = 5 * ASKS_AT_ONCE_MAX
ANSWER_S = 1.0


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
