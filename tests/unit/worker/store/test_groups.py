"""Models with several KV cache groups through a store: two of vLLM's schedulers with Baton's connector, and a store
between them. Each token is computed from right KV (see ``two_engines``).
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import msgspec
import pytest

from connector.holder.holder import HolderSettings
from connector.messages import Connected, EngineCall, EngineNotification, Peer, ReadPart, Results, StartFetch
from connector.reader.peers import key_of
from services.router.placement.kv_sources import boundaries_of
from services.router.state.prefix_index import PrefixIndex
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.store.kv_exchange import StoreExchange
from services.worker.engines.store.records import (
    BlockShape,
    SlotRecord,
    checksum_of,
    group_of,
    offset_of,
    pack_record,
    read_records,
    shape_of,
)
from services.worker.engines.store.slots import FileTier
from services.worker.engines.store.tiers import JobKind, Tiers
from services.worker.kv_events import HeldBlocks
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvEventBatch, KvSnapshot, block_hash64
from shared.contracts.kv_exchange import FetchedKv, FetchKv, KvGroupKind, KvRank, KvSource, LegOrder, unpack_full_hashes
from tests.unit.connector.kv_groups import LAYOUTS
from tests.unit.connector.test_handoff_of_groups import ANSWER, blocks_of, prompt_of
from tests.unit.connector.two_engines import Pair, answer_of

S, P = WorkerId("s"), WorkerId("p")
BLOCKS, SLOTS, JOB_BLOCKS = 60, 120, 3
PROMPTS = (150, 129, 128, 97)
CLOCK_BEHIND_S_MAX = 3600.0
"""How far the store's clock, which stands still, may be behind the engine's."""
KEPT = [name for name, layout in LAYOUTS.items() if not layout.drafts]
"""Layouts of which a copy ends where the engine's last boundary is."""


class Store:
    """A store's exchange; its memory and files hold what each token's slot holds. ``files`` outlive it. Its clock stands
    still, so that no deadline passes on a slow machine.
    """

    def __init__(self, shape: BlockShape, files: dict[int, list], records: list[SlotRecord]) -> None:
        self.name, self.shape, self.files = S, shape, files
        self.tiers = Tiers(BlockCache(BLOCKS), FileTier(SLOTS), JOB_BLOCKS, shape.plan)
        self.tiers.files.restore(records)
        holding = HolderSettings(worker_id=S, epoch=Epoch(1), lease_s_max=60.0, lease_share_max=0.9)
        now = time.monotonic()
        self.exchange = StoreExchange(holding, self.tiers, lambda: now)
        self.memory: list[list] = [[] for _ in range(BLOCKS)]
        self.ended: list[FetchedKv] = []
        self.held, self.index = HeldBlocks(), PrefixIndex()
        self.index.join(S, Epoch(1))
        self.index.restore(KvSnapshot(worker_id=S, epoch=Epoch(1), seq=0, hashes=b""))

    def call(self, **fields) -> EngineNotification:
        return self.exchange.call(EngineCall(**fields))

    def tell(self) -> list[EngineNotification]:
        self.exchange.poll()
        told = self.exchange.take_notifications()
        if told is not None:
            self.ended += [one.result for one in told.fetched]
        return [told] if told is not None else []

    def read(self, memory: list[list]) -> None:
        orders = self.exchange.take_orders()
        results = Results(connected=[Connected(key_of(peer), 0.0) for peer in orders.connect])
        for read in orders.reads:
            for local, remote in zip(read.local_blocks, read.remote_blocks, strict=True):
                self.memory[local] = list(memory[remote])
            count = len(read.local_blocks)
            results.parts.append(ReadPart(read.read_id, 0, count, 64 * count, 1.0, 2.0))
        self.exchange.results(results)

    def copy(self) -> None:
        """Carry out the jobs between memory and files."""
        while (job := self.exchange.next_job()) is not None:
            for block, slot in zip(job.blocks, job.slots, strict=True):
                if job.kind is JobKind.LOAD:
                    self.memory[block] = list(self.files.get(slot, []))
                else:
                    self.files[slot] = list(self.memory[block])
            contents = [repr(self.memory[block]).encode() for block in job.blocks]
            identity = self.shape.identity()
            sums = [checksum_of(identity, name, content) for name, content in zip(job.names, contents, strict=True)]
            self.exchange.ended(job, sums)

    def listen(self) -> None:
        """A router hears what is new."""
        events = self.tiers.take_events()
        seq = self.held.apply(events)
        assert not self.index.apply(KvEventBatch(worker_id=S, epoch=Epoch(1), seq=seq, events=events))
        assert not self.index.check(S, Epoch(1), self.held.digest())


class Trio(Pair):
    """A pair, and a store that reads from ``p`` and lends to ``d``."""

    store: Store

    def pump(self) -> None:
        if (store := getattr(self, "store", None)) is None:
            return super().pump()
        for engine in (self.p, self.d, store):
            for told in engine.tell():
                self.route(engine, told)
        memories = {name: engine.memory for name, engine in self.engines.items()}
        store.read(self.p.memory)
        store.copy()
        self.d.read(memories, self.fails)
        return self.p.read(memories, self.fails)

    def open_store(self, files: dict[int, list], records: list[SlotRecord]) -> None:
        """The store begins, or begins anew, with these files."""
        peer = self.p.call(describe=True).handshake
        shape = shape_of(peer)
        self.store = self.engines[S] = Store(shape, files, records)
        mine = KvRank(rank=0, agent=b"", device="cpu", device_id=0, layers=shape.at(4096))
        handshake = msgspec.structs.replace(peer, worker_id=S, blocks=BLOCKS, ranks=[mine])
        self.store.exchange.describe(handshake)
        self.store.call(peers=[Peer(handshake=peer, clock_ahead_s=0.0)])
        self.route(self.d, self.d.call(peers=[Peer(handshake=handshake, clock_ahead_s=-CLOCK_BEHIND_S_MAX)]))
        for _turn in range(3):
            self.pump()

    def copied(self) -> list[bytes]:
        """The hottest chain of ``p``, after the store has fetched it, as a worker that drains orders."""
        (chain, *_more) = self.p.call(chains_max=4).chains
        source = KvSource(worker_id=P, epoch=Epoch(1))
        fetch = FetchKv(worker_id=S, sender_id=P, hashes=chain.hashes, sources=[source], deadline_s=60.0)
        ended = len(self.store.ended)
        told = self.store.call(fetches=[StartFetch(fetch_id="f", fetch=fetch)])
        assert not told.fetched, "there is something to fetch"
        self.route(self.store, told)
        for _turn in range(30):
            self.pump()
            if len(self.store.ended) > ended:
                break
        result = self.store.ended[-1]
        hashes = unpack_full_hashes(chain.hashes)
        assert (result.held + result.fetched, result.failure) == (len(hashes), "")
        self.store.copy()
        return hashes

    def restart_store(self) -> None:
        """The store ends; its records pass through the bytes of the index."""
        old = self.store
        identity, size = old.shape.identity(), offset_of(1) - offset_of(0)
        packed = bytearray(SLOTS * size)
        for record in old.tiers.files.records():
            packed[record.slot * size : (record.slot + 1) * size] = pack_record(identity, record)
        self.open_store(old.files, read_records(identity, bytes(packed), SLOTS))
        assert self.store.tiers.files.names() == old.tiers.files.names()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def trio(folder):
    with ExitStack() as opened:

        def make(layout: str) -> Trio:
            trio = opened.enter_context(closing(Trio(folder, LAYOUTS[layout])))
            trio.open_store({}, [])
            return trio

        yield make


def prefill_and_copy(trio: Trio, prompt: list[int], name: str = "r") -> list[bytes]:
    trio.p.order(name, prompt, 1, LegOrder())
    trio.run()
    return trio.copied()


def ask_the_store(trio: Trio, prompt: list[int], name: str = "r") -> None:
    trio.d.order(name, prompt, ANSWER, LegOrder(sources=[KvSource(worker_id=S, epoch=Epoch(1))], wait_s_max=60.0))
    trio.run()
    assert trio.d.answer(name)[: len(prompt) + ANSWER] == answer_of(prompt, ANSWER)


@pytest.mark.parametrize("restarts", [False, True], ids=["from memory", "from files after a restart"])
@pytest.mark.parametrize("layout", KEPT)
def test_a_prompt_continues_from_the_store_as_from_its_engine(trio, layout, restarts):
    trio = trio(layout)
    for tokens in PROMPTS:
        prompt, name = prompt_of(tokens, tokens), f"r{tokens}"
        prefill_and_copy(trio, prompt, name)
        if restarts:
            trio.restart_store()
        trio.d.reads.clear()

        ask_the_store(trio, prompt, name)

        read = sum(len(read.local_blocks) for read in trio.d.reads)
        assert read == blocks_of(trio, 0, trio.d.plan.last_boundary(tokens))
        assert {read.peer[0] for read in trio.d.reads} == {S}
    assert trio.store.exchange.take_orders().reads == []


@pytest.mark.parametrize("layout", [name for name in KEPT if name != "full"])
def test_no_boundary_is_granted_of_which_a_block_is_lost(trio, layout):
    trio = trio(layout)
    prompt = prompt_of(150)
    hashes = prefill_and_copy(trio, prompt)
    tiers = trio.store.tiers
    last = max(group_of(name) for name in tiers.files.names())
    lost = next(name for name in reversed(tiers.files.names()) if group_of(name) == last)
    tiers.files.drop(lost)
    trio.restart_store()
    assert trio.store.tiers.hold(hashes).boundary == 0

    ask_the_store(trio, prompt)

    assert trio.d.reads == []


@pytest.mark.parametrize("layout", KEPT)
def test_a_router_knows_the_boundaries_of_copies(trio, layout):
    trio = trio(layout)
    prompt = prompt_of(150)
    hashes = prefill_and_copy(trio, prompt)
    boundary = trio.store.shape.plan.last_boundary(150)

    assert predicted(trio, hashes, prompt) == boundary
    trio.restart_store()
    assert predicted(trio, hashes, prompt) == boundary
    for name in trio.store.tiers.files.names():
        trio.store.tiers.files.drop(name)
    assert predicted(trio, hashes, prompt) == 0
    assert trio.store.held.digest().count == 0


def predicted(trio: Trio, hashes: list[bytes], prompt: list[int]) -> int:
    """Tokens that a router expects at the store."""
    from services.worker.engines.vllm.engine import hash_scheme

    trio.store.listen()
    plan, index = trio.store.shape.plan, trio.store.index
    groups = [(group.block_size, group.kind is KvGroupKind.FULL, group.window) for group in plan.groups]
    cache = SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256_cbor")
    scheme = hash_scheme(cache, plan.unit, plan.alignment, groups)
    usable = [block_hash64(one) for one in hashes][: scheme.usable(len(prompt)) // plan.unit]
    slot = index.slot(S)
    depths = index.match_boundaries(usable, boundaries_of(scheme)) if scheme.boundaries else index.match_depths(usable)
    return int(depths[slot]) * plan.unit
