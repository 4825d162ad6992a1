"""Fetches without a request leave memory to requests, and equal ones are one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.groups import full_attention
from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, Peer, ReadPart, StartFetch
from connector.reader.fetch import FetchLimits
from connector.reader.prefetch import HELD_SHARE_MAX
from connector.scheduler.exchange_core import ExchangeCore
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    FetchedKv,
    FetchKv,
    KvGrant,
    KvSource,
    LeaseKv,
    ReleaseKv,
    pack_full_hashes,
    unpack_full_hashes,
)
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.kv_messages import one_group
from tests.unit.connector.holding import BLOCK_TOKENS, chain

BLOCKS = 64
ROOM = int(BLOCKS * HELD_SHARE_MAX)


class Engine:
    """The exchange of an engine over vLLM's block pool, connected to ``p`` and ``q``, which hold everything."""

    def __init__(self) -> None:
        pool_module = pytest.importorskip("vllm.v1.core.block_pool")
        from connector.scheduler.connector_scheduler import PoolBlockAllocator  # Imports vLLM.

        self.now = 10.0
        self.pool = pool_module.BlockPool(BLOCKS, True, BLOCK_TOKENS)
        self.free_at_first = self.pool.get_num_free_blocks()
        holding = HolderSettings(worker_id=WorkerId("me"), epoch=Epoch(1))
        self.core = ExchangeCore(holding, full_attention(BLOCK_TOKENS), FetchLimits(), lambda: self.now)
        self.core.bind(self.pool, PoolBlockAllocator(self.pool, self.core.reader.groups))
        for worker_id in ("p", "q"):
            shape = Shape()
            told = handshake([RankMemory(shape, 0).described()], shape, worker_id)
            self.core.handle(EngineCall(peers=[Peer(handshake=told, clock_ahead_s=0.0)]))
        self.requests: list[LeaseKv] = []
        self.requested = 0
        self.results: dict[str, FetchedKv] = {}

    @property
    def pinned(self) -> int:
        return self.free_at_first - self.pool.get_num_free_blocks()

    def order(self, fetch_id: str, hashes: list[bytes], source: str = "p", deadline_s: float = 5.0) -> None:
        sources = [KvSource(worker_id=WorkerId(source), epoch=Epoch(1))]
        fetch = FetchKv(
            worker_id=WorkerId("me"),
            sender_id=WorkerId(source),
            hashes=pack_full_hashes(hashes),
            sources=sources,
            deadline_s=deadline_s,
        )
        self.core.handle(EngineCall(fetches=[StartFetch(fetch_id=fetch_id, fetch=fetch)]))
        self.step()

    def grant_all(self, *, refused: bool = False) -> None:
        """Each holder grants what is requested of it, or nothing."""
        requests, self.requests = self.requests, []
        self.requested += len(requests)
        for request in requests:
            count = 0 if refused else len(request.hashes) // 32
            grant = KvGrant(
                reader_id=WorkerId("me"),
                worker_id=request.worker_id,
                epoch=request.epoch,
                ask_id=request.ask_id,
                lease_id=request.ask_id if count else "",
                groups=one_group(range(count), request.first),
                last_hash=request.hashes[-32:] if count else b"",
                until_s=self.now + 30.0,
            )
            self.core.handle(EngineCall(grants=[grant]))
        self.step()

    def read_all(self, failure: str = "") -> int:
        """All reads end; returns the blocks that they read."""
        outbox = self.core.reader.outbox
        reads, outbox.reads = outbox.reads, []
        for read in reads:
            count = len(read.local_blocks)
            self.core.on_part(ReadPart(read.read_id, 0, count, 64 * count, 1.0, 2.0, failure))
        self.step()
        return sum(len(read.local_blocks) for read in reads)

    def step(self) -> None:
        self.core.on_time()
        notifications = self.core.notifications()
        self.requests += notifications.leases
        self.results |= {end.fetch_id: end.result for end in notifications.fetched}


@pytest.fixture
def engine():
    return Engine()


def test_all_fetches_together_leave_half_of_the_memory_to_requests(engine):
    for number in range(4):
        engine.order(f"f{number}", chain(20, f"prompt {number}"))
    engine.grant_all()
    assert engine.pinned == ROOM

    engine.read_all()

    fetched = [engine.results[f"f{number}"].fetched for number in range(4)]
    assert fetched == [20, ROOM - 20, 0, 0]
    assert engine.results["f2"].failure == "no memory is free"
    assert engine.pinned == 0


def test_cached_blocks_that_fetches_pin_count_too(engine):
    for number in range(2):
        engine.order(f"f{number}", chain(20, f"prompt {number}"))
        engine.grant_all()
        engine.read_all()
    assert engine.pinned == 0

    for number in range(2):
        engine.order(f"more-{number}", chain(21, f"prompt {number}"))

    assert engine.pinned == 20
    assert engine.results["more-1"].failure == "fetches pin too many blocks: try again later"


def test_equal_fetches_are_read_once(engine):
    hashes = chain(12)
    for number in range(5):
        engine.order(f"f{number}", hashes)
    engine.order("part", hashes[:7])
    engine.grant_all()

    assert (engine.read_all(), engine.requested) == (12, 1)

    assert (engine.results["f0"].held, engine.results["f0"].fetched) == (0, 12)
    others = [engine.results[name] for name in ("f1", "f2", "f3", "f4", "part")]
    assert [(one.held, one.fetched, one.failure) for one in others] == [(12, 0, "")] * 4 + [(7, 0, "")]
    assert (engine.pinned, engine.core.prefetcher.idle) == (0, True)


def test_an_order_that_waited_for_a_failed_fetch_tries_its_own_source(engine):
    hashes = chain(12)
    engine.order("f0", hashes, source="p")
    engine.order("same", hashes, source="p")
    engine.order("other", hashes, source="q")

    engine.grant_all(refused=True)
    assert (engine.results["f0"].failure, engine.results["same"].failure) == ("no source holds it",) * 2
    engine.grant_all()
    engine.read_all()

    assert (engine.results["other"].fetched, engine.results["other"].failure) == (12, "")
    assert engine.core.prefetcher.idle


def test_an_order_waits_no_longer_than_its_own_deadline(engine):
    hashes = chain(12)
    engine.order("f0", hashes, deadline_s=60.0)
    engine.order("short", hashes, deadline_s=1.0)
    engine.grant_all()

    engine.now += 1.0
    engine.step()

    assert engine.results["short"].failure == "the deadline passed"
    assert engine.read_all() == 12


def test_an_order_with_more_time_goes_on_after_the_deadline_of_the_first(engine):
    hashes = chain(12)
    engine.order("f0", hashes, deadline_s=0.2)
    engine.order("long", hashes, deadline_s=60.0)

    engine.now += 0.2
    engine.step()
    assert engine.results["f0"].failure == "the deadline passed"
    engine.grant_all()
    engine.read_all()

    assert engine.results["long"].fetched == 12


def test_a_store_is_offered_what_the_pool_evicts_next():
    engine = Engine()
    first, second = chain(8, "first"), chain(40, "second")

    def offered() -> tuple[list[list[bytes]], int]:
        call = EngineCall(chains_max=8, chains_uses_min=9, chains_idle_s_max=1.0, chains_for_store=True)
        engine.core.handle(call)
        told = engine.core.notifications()
        return [unpack_full_hashes(one.hashes) for one in told.chains], told.lost_blocks

    def computes(hashes: list[bytes]) -> None:
        blocks = engine.pool.get_new_blocks(len(hashes))
        engine.pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(hashes), BLOCK_TOKENS, 0)
        engine.pool.free_blocks(reversed(blocks))
        engine.core.used(hashes, len(hashes) * BLOCK_TOKENS)

    computes(first)
    assert offered() == ([], 0), "of the next 16 blocks, none has content"
    computes(second)
    assert offered() == ([first], 0), "15 have none"
    assert offered() == ([], 0)
    third = chain(55, "third")
    computes(third)
    assert offered() == ([second[:8], third], 32)
    computes(chain(63, "fourth"))
    computes(chain(63, "fifth"))
    assert offered() == ([chain(63, "fifth")], 63)


def test_what_a_store_has_copied_is_still_evicted_next():
    engine = Engine()
    first, second = chain(30, "first"), chain(30, "second")
    for hashes in (first, second):
        blocks = engine.pool.get_new_blocks(len(hashes))
        engine.pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(hashes), BLOCK_TOKENS, 0)
        engine.pool.free_blocks(reversed(blocks))
        engine.core.used(hashes, len(hashes) * BLOCK_TOKENS)
    call = EngineCall(chains_max=8, chains_uses_min=9, chains_idle_s_max=1.0, chains_for_store=True)
    engine.core.handle(call)
    assert [len(one.hashes) // 32 for one in engine.core.notifications().chains] == [30]

    for start in (0, 15):
        ask = LeaseKv(
            worker_id=WorkerId("me"),
            epoch=Epoch(1),
            reader_id=WorkerId("store"),
            ask_id=f"ask-{start}",
            first=start,
            hashes=pack_full_hashes(first[start : start + 15]),
            hold_s=5.0,
        )
        release = ReleaseKv(
            worker_id=WorkerId("me"), epoch=Epoch(1), reader_id=WorkerId("store"), ask_ids=[], lease_ids=[ask.ask_id]
        )
        engine.core.handle(EngineCall(leases=[ask]))
        assert engine.pinned == 15
        engine.core.handle(EngineCall(releases=[release]))

    engine.pool.get_new_blocks(20)
    assert (engine.core.holder.held(first), engine.core.holder.held(second)) == (10, 30)
