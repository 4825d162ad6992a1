"""Two of vLLM's schedulers with Baton's connector, which exchange simulated KV: every part of a handoff but the bus, NIXL
and the model.

A step checks before it computes that each block that the model would read holds what it must.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from math import lcm
from pathlib import Path
from types import SimpleNamespace

import msgspec
import zmq

from connector.groups import GroupPlan
from connector.messages import (
    Connected,
    EngineCall,
    EngineNotification,
    Orders,
    Peer,
    PeerGone,
    Read,
    ReadPart,
    Results,
)
from connector.reader.peers import key_of
from shared.contracts.ids import Epoch, LegId, WorkerId
from shared.contracts.kv_exchange import (
    KvGrant,
    KvGroupKind,
    KvLayer,
    KvOffer,
    KvPlane,
    KvRank,
    KvSource,
    KvTransferReport,
    LegOrder,
    NoGrant,
)
from tests.unit.connector.real_scheduler import Engine, Layout, make_scheduler, next_token

PATIENT = (("answer_s_max", 60.0), ("lease_s", 60.0), ("lease_s_max", 60.0), ("lease_share_max", 0.9))
TURNS_MAX = 500


@cache
def news_at(endpoint: str) -> zmq.Socket:
    """Where engines of one name send their notifications to, one after the other: they share vLLM's configuration."""
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(endpoint)
    return socket


class ExchangingEngine(Engine):
    def __init__(
        self, folder: Path, name: str, layout: Layout, *, depth: int, blocks: int = 80, retention: int | None = 0
    ) -> None:
        self.name, self.layout, self.depth, self.blocks = WorkerId(name), layout, depth, blocks
        endpoint = f"inproc://{name}"
        self.scheduler = make_scheduler(
            folder,
            asynchronous=depth > 1,
            with_connector=True,
            layout=layout,
            blocks=blocks,
            retention=retention,
            settings=(*PATIENT, ("worker_id", name), ("notifications", endpoint)),
        )
        self.scheduler.defer_block_free = depth > 1
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.unit = self.scheduler.hash_block_size
        self.free_at_first = self.pool.get_num_free_blocks()
        largest = max(group.block_size for group in layout.groups)
        self.memory = [[(-1, 0)] * largest for _ in range(blocks)]
        self.running, self.requests, self.queue = {}, {}, deque()
        self.preemptions = self.copies = 0
        self.side = self.scheduler.connector.connector_scheduler
        self.plan: GroupPlan = self.side.reader.groups
        self.sent: queue.Queue = queue.Queue()
        self.side.attach_to(
            SimpleNamespace(scheduler=self.scheduler, output_queue=self.sent, get_weight_version=lambda: "")
        )
        self.news = news_at(endpoint)
        self.tell()
        self.orders: list[Orders] = []
        self.results = Results()
        self.side.share_process(self.orders.append, self._take_results, lambda _wake: None)
        plane = KvPlane(offset=0, head_bytes=64, heads=1, total=1)
        layers = [
            KvLayer(name=f"layer {number}", group=number, base=4096, block_stride=64, planes=[plane])
            for number in range(len(layout.groups))
        ]
        self.side.describe([KvRank(rank=0, agent=b"", device="cpu", device_id=0, layers=layers)], blocks, {})
        self.reads: list[Read] = []
        self.outputs: list = []
        self.steps: list[dict[str, int]] = []
        """Tokens of each request in each step."""

    def close(self) -> None:
        self.side.close()

    def _take_results(self) -> Results:
        results, self.results = self.results, Results()
        return results

    def call(self, **fields) -> EngineNotification:
        packed = self.side.exchange(msgspec.msgpack.encode(EngineCall(**fields)))
        return msgspec.msgpack.decode(packed, type=EngineNotification)

    def tell(self) -> list[EngineNotification]:
        """All that is new for the worker."""
        told = []
        while self.news.poll(0):
            told.append(msgspec.msgpack.decode(self.news.recv(), type=EngineNotification))
        return told

    def order(self, request_id: str, prompt: list[int], answer_tokens: int, order: LegOrder) -> None:
        from connector.connector import PARAMS

        scheduler, self.scheduler = self.scheduler, SimpleNamespace(add_request=lambda _request: None)
        self.add(request_id, list(prompt), answer_tokens)
        self.scheduler = scheduler
        request = self.requests[request_id]
        request.kv_transfer_params = {PARAMS: order}
        self.scheduler.add_request(request)

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        self.steps.append(dict(step.num_scheduled_tokens))
        self.queue.append((step, self._take_tables(step)))

    def compute(self) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        step, work = self.queue.popleft()
        for copy in step.kv_cache_block_copies or ():
            self.copies += 1
            self.memory[copy.dst_block_id] = list(self.memory[copy.src_block_id])
        for one in work:
            self._check(*one)
        sampled = [self._write(*one) for one in work]
        ids = [one[0] for one in work]
        output = EMPTY_MODEL_RUNNER_OUTPUT
        if ids:
            output = ModelRunnerOutput(
                req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=sampled
            )
        self.outputs.append(self.scheduler.update_from_output(step, output))

    def _check(self, request_id: str, running, blocks: list[list[int]], computed: int, _count: int) -> None:
        for number, group in enumerate(self.layout.groups):
            size = group.block_size
            if group.kind is KvGroupKind.STATE or not computed:
                continue  # ``_write`` checks a state.
            begin = max(0, computed - group.window + 1) if group.kind is KvGroupKind.WINDOW else 0
            for at in range(begin, computed):
                held = self.memory[blocks[number][at // size]][at % size]
                assert held == (number, running.prefixes[at]), f"{request_id}: group {number} lacks token {at}"

    def read(self, memories: Mapping[WorkerId, list], fails: Callable[[Read], bool]) -> None:
        """Carry out the reads that were ordered, from other engines' memory; where one fails, no block holds anything
        that was written.
        """
        orders = list(self.orders)
        self.orders.clear()
        for one in orders:
            self.reads += one.reads
            self.results.connected += [Connected(key_of(peer), 0.0) for peer in one.connect]
            for read in one.reads:
                failed, memory = fails(read), memories[WorkerId(read.peer[0])]
                for local, remote in zip(read.local_blocks, read.remote_blocks, strict=True):
                    assert not self.pool.blocks[local].is_null
                    self.memory[local] = [(-2, -2)] * len(self.memory[local]) if failed else list(memory[remote])
                failure = "the holder is gone" if failed else ""
                count = len(read.local_blocks)
                self.results.parts.append(ReadPart(read.read_id, 0, count, 64 * count, 1.0, 2.0, failure))

    def hit(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are cached in all groups."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        hasher = get_request_block_hasher(self.unit, sha256_cbor)
        request = Request("of", list(prompt), SamplingParams(), None, block_hasher=hasher)
        tokens: int = self.manager.coordinator.find_longest_cache_hit(request.block_hashes, len(prompt) - 1)[1]
        return tokens

    def offer(self) -> KvOffer | None:
        """The offer of the last request that has ended."""
        from connector.connector import PARAMS

        ended = [one for outputs in self.outputs for each in outputs.values() for one in each.outputs]
        packed = [
            one.kv_transfer_params[PARAMS] for one in ended if one.kv_transfer_params and one.finish_reason is not None
        ]
        return msgspec.msgpack.decode(packed[-1], type=KvTransferReport).offer

    def answer(self, request_id: str) -> list[int]:
        """Tokens after the request's original prompt."""
        return self.running[request_id].tokens


class Pair:
    """``p`` computes prompts, ``d`` answers. The bus is a loop that takes each message at once."""

    def __init__(self, folder: Path, layout: Layout, *, depth: int = 1, retention: int | None = 0, blocks: int = 80):
        self.p = ExchangingEngine(folder, "p", layout, depth=depth, retention=retention, blocks=blocks)
        self.d = ExchangingEngine(folder, "d", layout, depth=depth, retention=retention, blocks=blocks)
        self.computing = [self.p, self.d]
        self.engines = {engine.name: engine for engine in self.computing}
        self.fails: Callable[[Read], bool] = lambda _read: False
        self.meet(self.p, self.d)
        self.meet(self.d, self.p)

    def meet(self, engine: ExchangingEngine, peer: ExchangingEngine) -> None:
        """From now on an engine can read from another."""
        known = Peer(handshake=peer.call(describe=True).handshake, clock_ahead_s=0.0)
        self.route(engine, engine.call(peers=[known]))

    def close(self) -> None:
        for engine in self.computing:
            engine.close()

    def route(self, sender: ExchangingEngine, told: EngineNotification) -> None:
        for lease in told.leases:
            self.send(sender, lease.worker_id, leases=[lease])
        for grant in told.grants:
            self.send(sender, grant.reader_id, grants=[grant])
        for release in told.releases:
            self.send(sender, release.worker_id, releases=[release])

    def send(self, sender: ExchangingEngine, to: WorkerId, **fields) -> None:
        """For an engine that is gone, the bus answers that nobody is there."""
        if (engine := self.engines.get(to)) is not None:
            self.route(engine, engine.call(**fields))
            return
        for lease in fields.get("leases", ()):
            about = {"worker_id": to, "epoch": lease.epoch, "reader_id": sender.name, "ask_id": lease.ask_id}
            answer = KvGrant(**about, clock_s=0.0, reason=NoGrant.UNREACHABLE)
            self.route(sender, sender.call(grants=[answer]))

    def pump(self) -> None:
        for engine in self.engines.values():
            for told in engine.tell():
                self.route(engine, told)
        memories = {name: engine.memory for name, engine in self.engines.items()}
        for engine in self.computing:
            engine.read(memories, self.fails)

    def turn(self, engine: ExchangingEngine) -> None:
        """One step of an engine, with as many in flight as it may have."""
        if engine.scheduler.has_requests() and len(engine.queue) < engine.depth:
            engine.schedule()
        if engine.queue and (len(engine.queue) >= engine.depth or not engine.scheduler.has_requests()):
            engine.compute()
        self.pump()

    def run(self, *, until: Callable[[], bool] | None = None) -> None:
        """Both engines take turns until they have nothing to do."""
        for _turn in range(TURNS_MAX):
            for engine in self.computing:
                self.turn(engine)
            if until is not None and until():
                return
            if until is None and not any(engine.busy for engine in self.computing):
                return
        raise AssertionError("the engines do not come to an end")

    def follow(self, leg_id: str = "r") -> LegOrder:
        source = KvSource(worker_id=self.p.name, epoch=Epoch(1), follow=True, leg_id=LegId(leg_id))
        return LegOrder(sources=[source], wait_s_max=60.0)

    def by_hash(self) -> LegOrder:
        return LegOrder(sources=[KvSource(worker_id=self.p.name, epoch=Epoch(1))])


class Three(Pair):
    """A pair, and ``q``, which computes prompts, too."""

    def __init__(self, folder: Path, layout: Layout, *, depth: int = 1) -> None:
        super().__init__(folder, layout, depth=depth)
        self.q = self.engines[WorkerId("q")] = ExchangingEngine(folder, "q", layout, depth=depth)
        self.computing.append(self.q)
        self.meet(self.d, self.q)

    def die(self, engine: ExchangingEngine) -> None:
        """The engine ends, and ``d`` hears of it."""
        self.computing.remove(engine)
        self.engines.pop(engine.name).close()
        self.route(self.d, self.d.call(gone=[PeerGone(worker_id=engine.name, epoch=Epoch(1))]))

    def by_hash(self) -> LegOrder:
        return LegOrder(sources=[KvSource(worker_id=name, epoch=Epoch(1)) for name in (self.p.name, self.q.name)])


def answer_of(prompt: list[int], count: int) -> list[int]:
    """What an engine alone answers, with the prompt before it."""
    tokens = list(prompt)
    for _token in range(count):
        tokens.append(next_token(tokens))
    return tokens


def whole_block(layout: Layout) -> int:
    return lcm(*(group.block_size for group in layout.groups))
