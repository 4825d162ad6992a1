"""Fetches without a request, of models with windows and states: a boundary becomes a hit of vLLM's, or nothing does."""

from __future__ import annotations

from hashlib import sha256

import pytest

from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, Peer, ReadPart, StartFetch
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    FetchedKv,
    FetchKv,
    GroupBlocks,
    KvGrant,
    KvSource,
    LeaseKv,
    pack_block_ids,
    pack_full_hashes,
)
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.unit.connector.kv_groups import LAYOUTS, SEVERAL, manager_of, plan_of

BLOCKS = 100
TOKENS = 256
P, Q = WorkerId("p"), WorkerId("q")


class Engine:
    """The exchange of an engine over vLLM's block pool, connected to ``p`` and ``q``, which hold everything."""

    def __init__(self, layout: str) -> None:
        self.manager = manager_of(LAYOUTS[layout], BLOCKS, events=True)
        self.plan = plan_of(self.manager.kv_cache_config)
        self.pool = self.manager.block_pool
        self.free_at_first = self.pool.get_num_free_blocks()
        self.hashes = [sha256(bytes([at])).digest() for at in range(TOKENS // self.plan.unit)]
        from connector.scheduler.connector_scheduler import PoolBlockAllocator, boundary_finder

        self.now = 10.0
        holding = HolderSettings(worker_id=WorkerId("me"), epoch=Epoch(1))
        self.core = ExchangeCore(holding, self.plan, FetchLimits(), lambda: self.now)
        find = boundary_finder(self.manager.coordinator)
        self.core.bind(self.pool, PoolBlockAllocator(self.pool, self.plan), find)
        for worker_id in (P, Q):
            shape = Shape()
            told = handshake([RankMemory(shape, 0).described()], shape, worker_id)
            self.core.handle(EngineCall(peers=[Peer(handshake=told, clock_ahead_s=0.0)]))
        self.core.reader.outbox.part_blocks = [1] * len(self.plan.groups)
        self.asked: list[LeaseKv] = []

    def fetch(self, source: WorkerId = P) -> None:
        fetch = FetchKv(
            worker_id=WorkerId("me"),
            sender_id=source,
            hashes=pack_full_hashes(self.hashes),
            sources=[KvSource(worker_id=source, epoch=Epoch(1))],
            deadline_s=5.0,
        )
        self.core.handle(EngineCall(fetches=[StartFetch(fetch_id="f", fetch=fetch)]))

    def grant(self, boundary: int = TOKENS) -> LeaseKv:
        """The holder grants all that is asked for."""
        (asked,) = self.core.notifications().leases
        runs = [self.plan.needed(number, asked.have, boundary) for number in range(len(self.plan.groups))]
        grant = KvGrant(
            reader_id=WorkerId("me"),
            worker_id=asked.worker_id,
            epoch=asked.epoch,
            ask_id=asked.ask_id,
            lease_id=asked.ask_id,
            groups=[GroupBlocks(first=run.start, block_ids=pack_block_ids(run)) for run in runs],
            boundary=boundary,
            last_hash=self.hashes[boundary // self.plan.unit - 1],
            until_s=self.now + 30.0,
        )
        self.core.handle(EngineCall(grants=[grant]))
        self.core.on_time()
        return asked

    def end_reads(self, *failing: int) -> set[int]:
        """All reads end, those of the groups in ``failing`` without success; returns the groups that were read."""
        outbox = self.core.reader.outbox
        reads, outbox.reads = outbox.reads, []
        for read in reads:
            failure = "gone" if read.group in failing else ""
            self.core.on_part(ReadPart(read.read_id, 0, len(read.local_blocks), 7, 1.0, 2.0, failure))
        self.core.on_time()
        return {read.group for read in reads}

    def result(self) -> FetchedKv:
        (ended,) = self.core.notifications().fetched
        return ended.result

    @property
    def hit(self) -> int:
        return self.manager.coordinator.find_longest_cache_hit(self.hashes, TOKENS)[1]

    @property
    def pinned(self) -> int:
        return self.free_at_first - self.pool.get_num_free_blocks()


@pytest.mark.parametrize("layout", [*SEVERAL, "one window"])
def test_a_fetched_boundary_is_a_hit_and_is_told_for_each_group(layout):
    engine = Engine(layout)
    engine.fetch()
    engine.grant()
    engine.end_reads()

    result = engine.result()
    assert (result.fetched, result.held, result.failure) == (len(engine.hashes), 0, "")
    assert (engine.hit, engine.pinned) == (TOKENS, 0)
    assert {event.group_idx for event in engine.pool.take_events()} == set(range(len(engine.plan.groups)))
    engine.fetch()
    assert engine.result() == FetchedKv(held=len(engine.hashes)), "what is held is not fetched again"


@pytest.mark.parametrize("layout", SEVERAL)
def test_without_one_group_nothing_is_a_hit_and_the_next_fetch_reads_no_full_attention_again(layout):
    engine = Engine(layout)
    rest = next(number for number in range(len(engine.plan.groups)) if number not in engine.plan.full)
    engine.fetch()
    engine.grant()
    engine.end_reads(rest)

    result = engine.result()
    assert (result.fetched, result.held, result.failure) == (0, 0, "gone")
    assert (engine.hit, engine.pinned) == (0, 0)

    engine.fetch(Q)
    asked = engine.grant()
    assert asked.have == TOKENS - engine.plan.stride
    engine.end_reads()
    assert (engine.result().fetched, engine.hit, engine.pinned) == (len(engine.hashes), TOKENS, 0)


@pytest.mark.parametrize("layout", SEVERAL)
def test_an_earlier_boundary_of_the_holder_is_fetched_and_counted(layout):
    engine = Engine(layout)
    boundary = TOKENS - engine.plan.alignment
    engine.fetch()
    engine.grant(boundary)
    engine.end_reads()

    result = engine.result()
    assert (result.fetched, result.failure) == (boundary // engine.plan.unit, "memory or sources had no more blocks")
    assert engine.hit == boundary


def test_a_boundary_for_which_too_few_blocks_are_free_is_not_fetched():
    engine = Engine("states")
    engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 15)
    free = engine.pool.get_num_free_blocks()
    engine.fetch()
    engine.grant()

    assert engine.end_reads() == set()
    assert (engine.result().failure, engine.pool.get_num_free_blocks()) == ("no memory is free", free)
