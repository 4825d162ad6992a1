"""Digests of KV: equal for equal KV whatever the ranks, layouts and places; any wrong block, layer or head shows."""

from __future__ import annotations

import numpy as np
import pytest

from connector.groups import GroupPlan, full_attention
from connector.holder.holder import HolderSettings
from connector.holder.lease_digests import DIGEST_S_MAX, DIGESTS_MAX, LeaseDigests
from connector.layout.routes import ReaderRank
from connector.messages import BlocksDigested, DigestBlocks, DigestLease, EngineCall, Orders, RankAggregation, Results
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from connector.transfer.memory_agent import MemoryNetwork
from connector.worker.digests import digested, read_cpu_memory
from connector.worker.transfer_thread import Copier, TransferThread
from shared.contracts.kv_exchange import DIGEST_BYTES, KvGroup, KvGroupKind
from tests.support.kv_engines import RankMemory, ReadingRank, Shape
from tests.unit.connector.holding import BLOCK_TOKENS, ME, Holding, chain

BLOCKS = [3, 5, 8]


def engine(**shape: object) -> list[RankMemory]:
    """The filled memory of each rank."""
    made = Shape(**shape)
    memories = [RankMemory(made, rank) for rank in range(made.ranks)]
    for memory in memories:
        memory.fill()
    return memories


def digest_of(memories: list[RankMemory], blocks: list[int] = BLOCKS) -> BlocksDigested:
    aggregation = RankAggregation(len(memories))
    for memory in memories:
        shape = memory.shape
        reader = ReaderRank(memory.described(), shape.ranks)
        joined = aggregation.add(Results(digested=[digested(DigestBlocks(1, [blocks]), reader, read_cpu_memory)]))
    return joined.digested[0]


@pytest.mark.parametrize(
    "shape", [{"ranks": 2}, {"ranks": 4}, {"ranks": 8}, {"blocks": 40}, {"dims": "LBHNC"}, {"dims": "BLHNC"}], ids=str
)
def test_engines_with_equal_kv_have_equal_digests(shape: dict):
    one, other = digest_of(engine()), digest_of(engine(**shape))

    assert other.digest(0) == one.digest(0)
    assert not other.uneven
    assert len(one.digest(0)) == DIGEST_BYTES


def test_the_places_of_blocks_do_not_matter_and_their_order_does():
    (memory,) = engine()
    before = digest_of([memory], [3, 5]).digest(0)
    for layer in range(memory.shape.layers):
        memory.block(layer, 11)[...] = memory.block(layer, 5)

    assert digest_of([memory], [3, 11]).digest(0) == before
    assert digest_of([memory], [5, 3]).digest(0) != before


def zero_a_layer(memory: RankMemory) -> None:
    memory.block(1, 5)[...] = 0


def swap_layers(memory: RankMemory) -> None:
    first = memory.block(0, 5).copy()
    memory.block(0, 5)[...], memory.block(1, 5)[...] = memory.block(1, 5), first


def swap_heads(memory: RankMemory) -> None:
    block = memory.block(2, 8)
    block[:, :, [0, 1]] = block[:, :, [1, 0]].copy()


def change_one_number(memory: RankMemory) -> None:
    memory.block(2, 8)[..., -1, -1] ^= 1


@pytest.mark.parametrize("damage", [zero_a_layer, swap_layers, swap_heads, change_one_number])
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_kv_has_another_digest(damage, ranks: int):
    memories = engine(ranks=ranks)
    damage(memories[-1])

    assert digest_of(memories).digest(0) != digest_of(engine()).digest(0)


def test_ranks_that_hold_the_same_heads_may_disagree():
    memories = engine(ranks=8)
    zero_a_layer(memories[5])

    assert digest_of(memories).uneven == {0}


def test_a_device_that_cannot_be_read_is_a_failure_of_the_digest():
    def broken(_address: int, _length: int) -> bytes:
        raise RuntimeError("CUDA error")

    memory = RankMemory(Shape(), 0)

    result = digested(DigestBlocks(1, [BLOCKS]), ReaderRank(memory.described(), 1), broken)
    assert "CUDA error" in result.failure


def test_memory_of_tensors_is_read_by_address():
    import torch

    from connector.layout.engine_layout import memory_reader

    shared = torch.arange(64, dtype=torch.int16)
    layers = {"a": shared[:32].view(4, 8), "b": shared[32:].view(4, 8), "c": torch.zeros(4, dtype=torch.bfloat16)}
    read = memory_reader(layers)

    assert np.frombuffer(read(layers["b"].data_ptr() + 4, 6), np.int16).tolist() == [34, 35, 36]
    assert read(layers["c"].data_ptr(), 8) == bytes(8)
    with pytest.raises(ValueError, match="no KV cache"):
        read(layers["c"].data_ptr(), 10)
    with pytest.raises(ValueError, match="no KV cache"):
        read(1, 1)


def test_the_transfer_thread_computes_digests():
    reading = ReadingRank(RankMemory(Shape(), 0))
    reading.memory.fill()
    agent = MemoryNetwork().agent("one")
    thread = TransferThread(lambda: Copier(agent, reading.own(agent), lambda: 0.0))
    try:
        thread.submit(Orders(digests=[DigestBlocks(7, [BLOCKS])]))
        (result,) = thread.take_results(wait_s=10.0).digested
    finally:
        thread.close()

    assert (result.digest_number, result.digest(0)) == (7, digest_of(engine()).digest(0))


class Engine:
    """Computes prompts of two blocks and offers them."""

    def __init__(self) -> None:
        self.now = 5.0
        self.holding = Holding(blocks=256)
        self.core = ExchangeCore(HolderSettings(**ME), full_attention(BLOCK_TOKENS), FetchLimits(), lambda: self.now)
        self.core.bind(self.holding.pool, None)
        self.core.notifications()

    def lease(self, number: int = 0) -> str:
        hashes = chain(2, f"prompt {number}")
        offer = self.core.holder.offer(
            hashes, len(hashes) * BLOCK_TOKENS, [self.holding.hold(hashes)], f"lease-{number}"
        )
        assert offer is not None
        return offer.lease_id

    def ask(self, lease_id: str) -> list[DigestBlocks]:
        self.core.handle(EngineCall(digests=[DigestLease(digest_id=f"of {lease_id}", lease_id=lease_id)]))
        orders, self.core.orders = self.core.orders, Orders()
        return orders.digests

    def told(self) -> list[tuple[str, int, str]]:
        return [(one.digest_id, len(one.digests), one.failure) for one in self.core.notifications().digested]


@pytest.fixture
def leasing() -> Engine:
    return Engine()


def test_a_leases_digest_is_computed_and_the_lease_ends(leasing: Engine):
    (order,) = leasing.ask(leasing.lease())
    core = leasing.core

    assert [len(of) for of in order.groups] == [2]
    assert core.works_without_request
    assert not core.is_idle
    core.on_digested(BlocksDigested(order.digest_number, {(0, 1, 0): b"x"}))
    assert core.has_notifications
    (told,) = core.notifications().digested
    assert (told.failure, [(one.group, one.blocks) for one in told.digests]) == ("", [(0, 2)])
    assert core.holder.counts.leases == 0
    assert core.is_idle


def test_what_cannot_be_digested_is_said(leasing: Engine):
    core = leasing.core
    assert leasing.ask("unknown") == []
    assert leasing.told() == [("of unknown", 0, "there is no such lease")]

    (order,) = leasing.ask(leasing.lease(1))
    core.on_digested(BlocksDigested(order.digest_number, {}, failure="no"))
    assert leasing.told() == [("of lease-1", 0, "no")]

    (order,) = leasing.ask(leasing.lease(2))
    core.holder.release_all()
    core.on_digested(BlocksDigested(order.digest_number, {(0, 1, 0): b"x"}))
    assert leasing.told() == [("of lease-2", 0, "the lease ended before the digests were computed")]


def test_digests_are_bounded_in_number_and_time(leasing: Engine):
    for number in range(DIGESTS_MAX):
        leasing.ask(leasing.lease(number))
    assert leasing.ask(leasing.lease(99)) == []
    assert "too many" in leasing.told()[0][2]

    leasing.now += DIGEST_S_MAX
    leasing.core.on_time()
    assert len(leasing.told()) == DIGESTS_MAX
    assert leasing.core.holder.counts.leases == 0


class OneLease:
    """The part of a holder that digests need, with a lease of a state and of full attention that ends within a block."""

    groups = GroupPlan(
        [
            KvGroup(kind=KvGroupKind.STATE, block_size=64),
            KvGroup(kind=KvGroupKind.FULL, block_size=64),
            KvGroup(kind=KvGroupKind.WINDOW, block_size=32, window=40),
        ],
        unit=32,
        alignment=32,
    )

    def leased(self, _lease_id: str) -> tuple[list[list[int]], int]:
        return [[9], [4, 5], [6, 7]], 96

    def release_own(self, _lease_id: str) -> None:
        pass


def test_what_a_block_holds_after_the_boundary_has_no_digest():
    digests = LeaseDigests(OneLease(), lambda: 0.0)  # type: ignore[arg-type]

    order = digests.start(DigestLease(digest_id="d", lease_id="l"))

    assert order is not None
    assert order.groups == [[9], [4], [6, 7]]
