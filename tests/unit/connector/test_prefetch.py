"""Fetches without a request leave memory to requests, and equal ones are one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.groups import full_attention
from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, Peer, ReadPart, StartFetch
from connector.reader.fetch import FetchLimits
from connector.reader.prefetch import HELD_SHARE_MAX, PREFETCHED_SHARE_MAX
from connector.reader.prefetched_blocks import SWEEP_S, UNUSED_S_MAX
from connector.scheduler.exchange_core import ExchangeCore
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    FetchedKv,
    FetchKv,
    KvExchangeState,
    KvGrant,
    KvSource,
    LeaseKv,
    LegOrder,
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
    def prefetched(self) -> tuple[int, int, int]:
        """Blocks that prefetches brought, and those used and wasted, as the worker is told."""
        self.now += SWEEP_S
        self.core.handle(EngineCall())
        state: KvExchangeState | None = self.core.notifications().state
        assert state is not None
        return state.prefetched_blocks_total, state.prefetch_used_blocks_total, state.prefetch_wasted_blocks_total

    def prefetch(self, fetch_id: str, hashes: list[bytes]) -> int:
        """Order it and let all arrive; returns the blocks that were read."""
        self.order(fetch_id, hashes, is_prefetch=True)
        self.grant_all()
        return self.read_all()

    def ask(self, hashes: list[bytes], local: int, request_id: str = "r") -> int | None:
        """What the reader answers when the engine schedules a request with so many cached blocks."""
        request = SimpleNamespace(
            request_id=request_id, num_preemptions=0, num_tokens=len(hashes) * BLOCK_TOKENS + 1, block_hashes=hashes
        )
        order = LegOrder(sources=[KvSource(worker_id=WorkerId("p"), epoch=Epoch(1))])
        return self.core.reader.matched(request, order, local * BLOCK_TOKENS)

    def evict_all(self) -> None:
        """New content takes all blocks."""
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))

    @property
    def pinned(self) -> int:
        return self.free_at_first - self.pool.get_num_free_blocks()

    def order(
        self,
        fetch_id: str,
        hashes: list[bytes],
        source: str = "p",
        deadline_s: float = 5.0,
        *,
        is_prefetch: bool = False,
    ) -> None:
        sources = [KvSource(worker_id=WorkerId(source), epoch=Epoch(1))]
        fetch = FetchKv(
            worker_id=WorkerId("me"),
            sender_id=WorkerId(source),
            hashes=pack_full_hashes(hashes),
            sources=sources,
            deadline_s=deadline_s,
        )
        self.core.handle(EngineCall(fetches=[StartFetch(fetch_id=fetch_id, fetch=fetch, is_prefetch=is_prefetch)]))
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


def test_unused_prefetched_blocks_have_a_bound_and_used_ones_have_none(engine):
    most = int(BLOCKS * PREFETCHED_SHARE_MAX)
    first, second, third = (chain(10, name) for name in ("first", "second", "third"))

    assert (engine.prefetch("f1", first), engine.prefetch("f2", second)) == (10, most - 10)
    assert engine.prefetch("f3", third) == 0
    assert engine.results["f3"].failure == "no memory is free"
    assert engine.ask(first, 10) == 0

    assert engine.prefetch("f4", third) == 10
    assert engine.prefetched == (10 + most, 10, 0)


def test_other_fetches_neither_count_as_prefetches_nor_have_their_bound(engine):
    for number in range(2):
        engine.order(f"f{number}", chain(15, f"prompt {number}"))
    engine.grant_all()

    assert engine.read_all() == 30
    assert engine.prefetched == (0, 0, 0)


def test_prefetched_blocks_are_used_once_and_by_those_who_find_them(engine):
    prompt = chain(10)
    engine.prefetch("f", prompt)

    engine.ask(chain(10, "another"), 10, "another")
    assert engine.prefetched == (10, 0, 0)
    for number in range(2):
        engine.ask(prompt[:6], 6, f"short {number}")
        assert engine.prefetched == (10, 6, 0)
    engine.ask([*prompt, *chain(3, "more")], 10, "next turn")
    assert engine.prefetched == (10, 10, 0)


def test_prefetched_blocks_that_are_evicted_or_not_used_in_time_are_wasted(engine):
    engine.prefetch("f1", chain(10, "evicted"))
    engine.evict_all()
    assert engine.prefetched == (10, 0, 10)

    late = chain(6, "late")
    engine.prefetch("f2", late)
    engine.now += UNUSED_S_MAX
    assert engine.prefetched == (16, 0, 16)
    engine.ask(late, 6)
    assert engine.prefetched == (16, 0, 16)


def test_a_request_waits_for_the_prefetch_under_way_and_reads_nothing_twice(engine):
    prompt = chain(10)
    engine.order("f", prompt, is_prefetch=True)
    engine.grant_all()

    assert engine.ask([*prompt, *chain(3, "more")], 0) is None
    engine.step()
    assert engine.requests == []
    assert engine.ask(chain(10, "another"), 0, "another") is None
    engine.step()
    assert len(engine.requests) == 1, "another prompt is fetched"

    assert engine.read_all() == 10
    assert engine.ask(prompt, 10) == 0


def test_a_prefetch_that_comes_after_its_request_reads_nothing(engine):
    prompt = chain(10)
    assert engine.ask([*prompt, *chain(3, "more")], 0) is None
    engine.step()
    assert len(engine.requests) == 1

    engine.order("late", prompt, is_prefetch=True)
    engine.order("another", chain(10, "another"), is_prefetch=True)

    assert engine.results["late"].failure == "a request reads it already"
    assert "another" not in engine.results


def test_a_request_does_not_wait_for_a_prefetch_that_failed(engine):
    prompt = chain(10)
    engine.order("f", prompt, is_prefetch=True)
    engine.grant_all(refused=True)
    assert engine.results["f"].failure

    assert engine.ask(prompt, 0) is None
    engine.step()
    assert len(engine.requests) == 1, "it asks itself"


def test_time_of_reads_without_a_request_is_told_apart(engine):
    engine.prefetch("f", chain(10))
    engine.prefetched  # noqa: B018

    state = engine.core.notifications().state
    assert (state.read_seconds_total, state.prefetch_seconds_total) == (1.0, 1.0)
