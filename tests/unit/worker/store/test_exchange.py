"""Grants of a store: blocks in memory at once, blocks in files after loading."""

from __future__ import annotations

import ctypes
import hashlib

import msgspec
import pytest

from connector.groups import Blocks, full_attention
from connector.holder.holder import HolderSettings
from connector.layout.routes import ReaderRank, routes_to, spans_of
from connector.layout.tensors import heads_of
from connector.messages import EngineCall
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.store.kv_exchange import COMING_S, LOAD_S_MAX, SPEED_S_MAX, STILL_S_MAX, StoreExchange
from services.worker.engines.store.records import SlotRecord, shape_of
from services.worker.engines.store.slots import FileTier
from services.worker.engines.store.tiers import SAVE_AGAIN_S, Tiers
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvHandshake, KvRank, LeaseKv, NoGrant, ReleaseKv, pack_full_hashes
from shared.contracts.load import StoreState
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.kv_messages import blocks_of

STORE, READER = WorkerId("s1"), WorkerId("d1")
BLOCKS, SLOTS, JOB_BLOCKS = 8, 32, 3
SUM = b"c" * 16


def chain(number: int, length: int) -> list[bytes]:
    return [hashlib.sha256(bytes([number, at])).digest() for at in range(length)]


class Store:
    def __init__(self) -> None:
        self.now = 100.0
        self.tiers = Tiers(BlockCache(BLOCKS), FileTier(SLOTS), JOB_BLOCKS, full_attention(32))
        holding = HolderSettings(worker_id=STORE, epoch=Epoch(1), lease_share_max=1.0)
        self.exchange = StoreExchange(holding, self.tiers, lambda: self.now)
        self.asks = 0

    def in_files(self, names: list[bytes]) -> None:
        self.tiers.files.restore(SlotRecord(name, slot, SUM, slot + 1) for slot, name in enumerate(names))

    def in_memory(self, names: list[bytes]) -> None:
        blocks = self.tiers.allocate(len(names))
        self.tiers.cache(names, Blocks(0, 0, blocks), 32 * len(names))
        self.tiers.free(blocks)

    def ask(self, names: list[bytes], load_s: float = 0.0, **fields):
        self.asks += 1
        lease = LeaseKv(
            worker_id=STORE,
            epoch=Epoch(1),
            reader_id=READER,
            ask_id=f"a{self.asks}",
            hashes=pack_full_hashes(names),
            hold_s=5.0,
            load_s=load_s,
        )
        return self.exchange.call(EngineCall(leases=[lease], **fields)).grants

    def load(self, checksum: bytes = SUM, jobs: int = 9):
        """Carry out so many jobs; what the store says then."""
        for _ in range(jobs):
            if (job := self.exchange.next_job()) is None:
                break
            self.exchange.ended(job, [checksum] * len(job.names))
        return self.poll()

    def poll(self):
        self.exchange.poll()
        notifications = self.exchange.take_notifications()
        return notifications.grants if notifications is not None else []

    @property
    def pinned(self) -> int:
        return BLOCKS - self.tiers.memory.free


@pytest.fixture
def store():
    return Store()


def test_blocks_in_memory_are_granted_at_once(store):
    store.in_memory(chain(1, 4))

    (grant,) = store.ask(chain(1, 4))

    assert (len(blocks_of(grant)), grant.reason, grant.last_hash) == (4, None, chain(1, 4)[-1])
    assert store.pinned == 4


def test_blocks_in_files_are_granted_after_loading(store):
    store.in_files(chain(1, 5))

    assert store.ask(chain(1, 5)) == []
    assert store.load(jobs=1) == []
    (grant,) = store.load()

    assert (len(blocks_of(grant)), grant.reason) == (5, None)
    assert [store.tiers.memory.block_of(name) for name in chain(1, 5)] == blocks_of(grant)


def test_blocks_loaded_too_late_serve_the_next_lease_request(store):
    store.in_files(chain(1, 6))
    assert store.ask(chain(1, 6)) == []
    assert store.load(jobs=1) == []

    store.now += LOAD_S_MAX
    (grant,) = store.poll()
    assert (len(blocks_of(grant)), grant.reason) == (JOB_BLOCKS, NoGrant.NOT_HELD)

    store.load()
    (whole,) = store.ask(chain(1, 6))
    assert len(blocks_of(whole)) == 6


def test_a_patient_reader_is_told_that_blocks_come_and_gets_all(store):
    store.in_files(chain(1, 7))
    store.ask(chain(1, 7), load_s=2.0)

    for _job in range(2):
        store.now += LOAD_S_MAX * 0.9
        (coming,) = store.load(jobs=1)
        assert (coming.final, coming.groups, coming.reason, coming.lease_id) == (False, [], None, "")
    store.now += LOAD_S_MAX * 0.9
    (grant,) = store.load(jobs=1)

    assert (grant.final, len(blocks_of(grant)), grant.reason) == (True, 7, None)


def test_a_patient_reader_is_told_that_blocks_come_while_other_jobs_run(store):
    store.in_files(chain(1, 3))
    store.ask(chain(1, 3), load_s=2.0)

    for _time in range(4):
        assert store.exchange.wakes_at() == pytest.approx(store.now + COMING_S)
        store.now += COMING_S
        (coming,) = store.poll()
        assert not coming.final
    store.now += COMING_S
    (grant,) = store.poll()
    assert (grant.final, grant.reason) == (True, NoGrant.NOT_HELD)


def test_a_patient_reader_is_told_seldom(store):
    store.in_files(chain(1, 7))
    store.ask(chain(1, 7), load_s=2.0)

    assert store.load(jobs=1) == []
    assert store.pinned == 0


@pytest.mark.parametrize("load_s", [0.5, float("inf"), float("nan")])
def test_no_reader_waits_longer_than_it_allows_or_than_files_stand_still(store, load_s):
    store.in_files(chain(1, 7))
    store.ask(chain(1, 7), load_s=load_s)
    store.now += 0.29
    store.load(jobs=1)

    store.now += {0.5: 0.22, float("inf"): STILL_S_MAX}.get(load_s, LOAD_S_MAX)
    (grant,) = store.poll()

    assert (grant.final, len(blocks_of(grant)), grant.reason) == (True, JOB_BLOCKS, NoGrant.NOT_HELD)


def test_a_store_does_not_load_what_its_reader_has_computed_sooner(store):
    store.in_files(chain(1, 3) + chain(2, 3))
    store.ask(chain(1, 3), load_s=1.0)
    job = store.exchange.next_job()
    store.now += 0.3
    store.exchange.ended(job, [SUM] * 3)
    store.poll()

    (grant,) = store.ask(chain(2, 3), load_s=0.29)
    assert (grant.groups, grant.final, grant.reason) == ([], True, NoGrant.NOT_HELD)
    assert store.exchange.next_job() is None
    store.now += SPEED_S_MAX
    assert store.ask(chain(2, 3), load_s=0.29) == [], "a disk that was slow is tried again"
    store.now += 0.29
    (grant,) = store.poll()
    assert (grant.groups, grant.final) == ([], True)


def test_the_wait_for_a_load_ends_by_itself(store):
    store.in_files(chain(1, 2))
    store.ask(chain(1, 2))

    assert store.exchange.wakes_at() == pytest.approx(store.now + LOAD_S_MAX)


def test_two_asks_for_the_same_blocks_share_one_load(store):
    store.in_files(chain(1, 3))
    assert store.ask(chain(1, 3)) == []
    assert store.ask(chain(1, 3)) == []

    grants = store.load(jobs=1)

    assert [len(blocks_of(grant)) for grant in grants] == [3, 3]
    assert store.exchange.next_job() is None


def test_a_damaged_block_ends_the_grant_and_is_forgotten(store):
    store.in_files(chain(1, 3))
    store.ask(chain(1, 3))

    (grant,) = store.load(checksum=b"x" * 16)

    assert (grant.groups, grant.reason) == ([], NoGrant.NOT_HELD)
    assert (len(store.tiers.files), store.tiers.counts.damaged, store.pinned) == (0, 3, 0)


def test_loading_evicts_neither_the_same_prompt_nor_leased_blocks(store):
    store.in_memory(chain(2, 4))
    (leased,) = store.ask(chain(2, 4))
    store.in_files(chain(1, 7))
    store.ask(chain(1, 2))
    store.load()

    store.ask(chain(1, 7))
    store.now += LOAD_S_MAX
    (grant,) = store.load()

    assert len(blocks_of(grant)) == BLOCKS - 4
    assert not set(blocks_of(grant)) & set(blocks_of(leased))


def test_an_ask_released_while_it_waits_pins_nothing(store):
    store.in_files(chain(1, 3))
    store.ask(chain(1, 3))

    store.exchange.call(
        EngineCall(releases=[ReleaseKv(worker_id=STORE, epoch=Epoch(1), reader_id=READER, ask_ids=["a1"])])
    )

    assert store.load() == []
    assert store.pinned == 0


def test_a_closing_store_refuses_waiting_asks(store):
    store.in_files(chain(1, 3))
    store.ask(chain(1, 3))
    store.exchange.call(EngineCall(release_all=True))

    (grant,) = store.load()

    assert (grant.groups, grant.reason, store.pinned) == ([], NoGrant.DRAINING, 0)


def test_the_store_state_counts_blocks_kept_and_granted(store):
    store.in_files(chain(1, 5))
    store.in_memory(chain(2, 4))
    store.ask(chain(2, 4))
    store.ask(chain(1, 5))
    store.exchange.next_job()

    assert store.exchange.state(1000) == StoreState(
        block_bytes=1000,
        host_blocks=4,
        host_blocks_max=8,
        disk_blocks=5,
        disk_blocks_max=SLOTS,
        loads_waiting=4,  # as many as there is room for beside what is leased
        saves_waiting=4,
        granted_bytes_total=4000,
    )


def test_the_store_state_counts_copies_damage_and_evictions(store):
    store.in_memory(chain(1, BLOCKS))
    store.load()
    store.in_memory(chain(2, 3))
    store.load(checksum=b"")
    store.now += SAVE_AGAIN_S
    store.ask(chain(1, BLOCKS))
    store.load(checksum=b"x" * 16)
    told = store.exchange.state(1000)

    assert (told.saved_blocks_total, told.unsaved_blocks_total) == (BLOCKS, 3)
    assert (told.damaged_blocks_total, told.loaded_blocks_total) == (3, 0)
    assert (told.disk_blocks, told.evicted_disk_blocks_total) == (BLOCKS - 3, 0)
    assert told.evicted_host_blocks_total == 3 + 3


def test_blocks_waiting_for_a_save_are_bounded_by_memory(store):
    store.in_memory(chain(0, 1))
    store.load(checksum=b"", jobs=1)
    for number in range(1, 20):
        store.in_memory(chain(number, 4))

    assert store.exchange.next_job() is None
    assert store.exchange.state(1000).saves_waiting == BLOCKS


def test_a_stored_block_is_contiguous_over_layers_heads_and_ranks():
    shape = Shape(ranks=2, kv_heads=4, layers=3)
    ranks = [RankMemory(shape, rank).described() for rank in range(2)]

    mine = shape_of(handshake(ranks, shape))
    layers = mine.at(1 << 20)

    sizes = [
        plane.head_bytes * len(heads_of(rank.rank, 2, 4))
        for rank in ranks
        for layer in rank.layers
        for plane in layer.planes
    ]
    assert mine.block_bytes == sum(sizes)
    assert {layer.block_stride for layer in layers} == {mine.block_bytes}
    spans = sorted(
        (layer.base + plane.offset, plane.head_bytes * plane.heads) for layer in layers for plane in layer.planes
    )
    ends = [start + length for start, length in spans]
    assert [start for start, _length in spans] == [1 << 20, *ends[:-1]]
    assert ends[-1] == (1 << 20) + mine.block_bytes


def test_a_store_copies_a_block_in_one_piece_where_the_engine_keeps_layers_together():
    shape = Shape(layers=3, dims="BLHNC")
    peer = handshake([RankMemory(shape, 0).described()], shape)
    stored = KvRank(rank=0, agent=b"", device="cpu", device_id=0, layers=shape_of(peer).at(1 << 20))

    (route,) = routes_to(ReaderRank(stored, 1), peer)
    there, _ = spans_of(route, [3, 9], [0, 5])

    assert there[:, 1].tolist() == [shape_of(peer).block_bytes] * 2


def test_blocks_of_all_groups_fit_into_the_same_places():
    shape = Shape(layers=5, groups=2)
    mine = shape_of(handshake([RankMemory(shape, 0).described()], shape))
    layers = mine.at(1 << 20)

    one = sum(plane.head_bytes * plane.heads for plane in layers[0].planes)
    assert mine.block_bytes == 3 * one, "that of the group with three of the five layers"
    places = [(layer.group, layer.base - (1 << 20), layer.block_stride) for layer in layers]
    assert places == [(0, 0, 3 * one), (1, 0, 3 * one), (0, one, 3 * one), (1, one, 3 * one), (0, 2 * one, 3 * one)]


@pytest.mark.parametrize(
    "fields", [{"hash_block_size": 3}, {"hash_block_size": 16, "alignment": 16}, {"alignment": 12}]
)
def test_blocks_that_end_between_hashes_are_refused(fields):
    shape = Shape()
    peer = handshake([RankMemory(shape, 0).described()], shape)

    with pytest.raises(ValueError, match="hashes are of"):
        shape_of(msgspec.structs.replace(peer, **fields))


def test_blocks_of_two_groups_pass_through_a_store_unchanged():
    shape = Shape(layers=5, groups=2)
    engine, reader = RankMemory(shape, 0), RankMemory(shape, 0)
    engine.fill()
    peer = handshake([engine.described()], shape)
    arena = ctypes.create_string_buffer(8 * shape_of(peer).block_bytes)
    layers = shape_of(peer).at(ctypes.addressof(arena))
    stored = KvRank(rank=0, agent=b"", device="cpu", device_id=0, layers=layers)
    held, copies = {0: [3, 4], 1: [3, 9]}, {0: [0, 1], 1: [2, 5]}

    move(stored, peer, held, copies)
    move(reader.described(), handshake([stored], shape), copies, held)

    for layer in range(5):
        for block in range(shape.blocks):
            is_held = block in held[layer % 2]
            assert (reader.block(layer, block) == engine.block(layer, block) * is_held).all()


def move(to: KvRank, peer: KvHandshake, theirs: dict[int, list[int]], own: dict[int, list[int]]) -> None:
    """Copy a peer's blocks of each group."""
    for route in routes_to(ReaderRank(to, 1), peer):
        there, here = spans_of(route, theirs[route.group], own[route.group])
        for source, target in zip(there.tolist(), here.tolist(), strict=True):
            ctypes.memmove(target[0], source[0], source[1])


def test_blocks_of_another_fingerprint_shape_or_length_have_another_identity():
    shape = Shape()
    one = handshake([RankMemory(shape, 0).described()], shape)
    others = [Shape(layers=4), Shape(first_layer=1), Shape(kv_heads=2), Shape(block_size=16), Shape(content=32)]
    identities = {shape_of(handshake([RankMemory(other, 0).described()], other)).identity() for other in others}
    renamed = shape_of(type(one)(**{name: getattr(one, name) for name in one.__struct_fields__} | {"fingerprint": "f"}))

    assert len({shape_of(one).identity(), renamed.identity(), *identities}) == 7
