"""A worker without an engine, which lends blocks with known bytes to a store and reads the store's, over NIXL."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from connector.groups import full_attention
from connector.holder.holder import Holder, HolderSettings
from connector.layout.routes import ReaderRank, routes_to, spans_of
from connector.layout.tensors import PROTOCOL_VERSION
from connector.transfer.agent import Connecting, Region, TransferAgent, TransferState
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import (
    KV_FETCH,
    KV_GRANT,
    KV_HANDSHAKE,
    KV_LEASE,
    KV_RELEASE,
    KV_SNAPSHOT,
    LOAD,
    WORKER_RECORDS,
)
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot, block_hash64, unpack_hashes
from shared.contracts.kv_exchange import (
    FULL_HASH_BYTES,
    AskKvHandshake,
    FetchedKv,
    FetchKv,
    KvGrant,
    KvHandshake,
    KvLayer,
    KvPlane,
    KvRank,
    KvSource,
    LeaseKv,
    ReleaseKv,
    new_lease_id,
    pack_full_hashes,
    unpack_block_ids,
)
from shared.contracts.load import LoadReport
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import (
    WORKER_RECORD_TTL_S,
    Fingerprint,
    HashScheme,
    Role,
    WorkerPhase,
    WorkerRecord,
    with_backend,
)

ME, MODEL = WorkerId("conformance"), "conformance"
BLOCK_TOKENS = 16
LAYERS, PLANES, HEADS, HEAD_BYTES = 2, 2, 2, 2048
LAYER_BYTES = PLANES * HEADS * HEAD_BYTES
BLOCK_BYTES = LAYERS * LAYER_BYTES
CHAIN_MAX = 32
"""Blocks of the longest prompt."""
BLOCKS = 2 * CHAIN_MAX
"""The first half is lent, the second one is read into."""
POLL_S = 0.005


def chain(text: str, length: int) -> list[bytes]:
    """Names of the blocks of a prompt."""
    return [hashlib.sha256(f"{text} {number}".encode()).digest() for number in range(length)]


def content_of(name: bytes) -> np.ndarray[Any, Any]:
    """The bytes of a block, by layer."""
    numbers = np.random.default_rng(int.from_bytes(name[:8]))
    return numbers.integers(0, 256, (LAYERS, LAYER_BYTES), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Block:
    block_id: int
    ref_cnt: int = 0


class _Lent:
    """A ``connector.holder.holder.Pool``: the blocks of one prompt at a time."""

    def __init__(self) -> None:
        self.blocks: Sequence[Any] = [_Block(number) for number in range(BLOCKS)]
        self.enable_caching = True
        self.names: list[bytes] = []

    def get_cached_block(self, block_hash: bytes, _groups: list[int]) -> list[_Block] | None:
        return [self.blocks[self.names.index(block_hash)]] if block_hash in self.names else None

    def touch(self, blocks: Sequence[_Block]) -> None:
        """Nothing is evicted: whoever lends another prompt waits until this one is read."""

    def free_blocks(self, ordered_blocks: Iterable[_Block]) -> None:
        """See ``touch``."""


class Reference:
    """Call ``open``, then the rest. Methods that ask the store raise BusError, TimeoutError."""

    def __init__(self, bus: Bus, store: str, agent: TransferAgent, backend: str, *, answer_s_max: float) -> None:
        self.store = WorkerId(store)
        self.epoch = Epoch(int(time.time() * 1000))
        self.handshake: KvHandshake
        """The store's, after ``connect``."""
        self.load: LoadReport | None = None
        """The store's newest."""
        self.answer_s_max = answer_s_max
        self._bus = bus
        self._agent = agent
        self._memory = np.zeros((LAYERS, BLOCKS, LAYER_BYTES), dtype=np.uint8)
        self._scratch = np.zeros(8, dtype=np.uint8)
        self._lent = _Lent()
        limits = HolderSettings(worker_id=ME, epoch=self.epoch, lease_share_max=1.0)
        self._holder = Holder(limits, time.monotonic)
        self._holder.bind(self._lent, full_attention(BLOCK_TOKENS))
        self._grants: dict[str, asyncio.Future[KvGrant]] = {}
        self._peer = ""
        self._reported = asyncio.Event()
        name = with_backend(f"baton-{PROTOCOL_VERSION}/nixl-conformance", backend)
        self._fingerprint = Fingerprint(
            model=MODEL, revision="", dtype="", block_size=BLOCK_TOKENS, kv_layout="", connector=name, engine_version=""
        )
        self._agent.register([Region(self._memory.ctypes.data, self._memory.nbytes, "cpu", 0)])
        self._rank = KvRank(rank=0, agent=agent.metadata(), device="cpu", device_id=0, layers=list(self._layers()))

    def _layers(self) -> Iterable[KvLayer]:
        head = HEADS * HEAD_BYTES
        planes = [KvPlane(offset=at * head, head_bytes=HEAD_BYTES, heads=HEADS, total=HEADS) for at in range(PLANES)]
        for number in range(LAYERS):
            base = self._memory[number].ctypes.data
            yield KvLayer(name=f"layer.{number}", group=0, base=base, block_stride=LAYER_BYTES, planes=planes)

    @property
    def own(self) -> KvHandshake:
        return KvHandshake(
            worker_id=ME,
            epoch=self.epoch,
            version=PROTOCOL_VERSION,
            fingerprint=self._fingerprint.base_key(),
            clock_s=time.monotonic(),
            hash_block_size=BLOCK_TOKENS,
            alignment=BLOCK_TOKENS,
            groups=list(full_attention(BLOCK_TOKENS).groups),
            blocks=BLOCKS,
            ranks=[self._rank],
        )

    async def open(self) -> None:
        """Every subscription is live when it returns."""
        await self._bus.answer(KV_HANDSHAKE, self._describe, worker_id=ME)
        await self._bus.subscribe(KV_LEASE, self._lend, worker_id=ME)
        await self._bus.subscribe(KV_RELEASE, lambda release, _envelope: self._holder.release(release), worker_id=ME)
        await self._bus.subscribe(KV_GRANT, self._granted, reader_id=ME)
        await self._bus.subscribe(LOAD, self._loaded, worker_id=self.store)

    async def stay_registered(self) -> None:
        """Until cancelled: stores find their partner in the registry, where it expires. No router places requests here,
        as it never gets ready.
        """
        record = WorkerRecord(
            worker_id=ME,
            epoch=self.epoch,
            role=Role.BOTH,
            phase=WorkerPhase.PROBING,
            engine="conformance",
            models=[MODEL],
            max_model_len=CHAIN_MAX * BLOCK_TOKENS,
            fingerprint=self._fingerprint,
            hashing=HashScheme(block_size=BLOCK_TOKENS),
            kv_tokens=BLOCKS * BLOCK_TOKENS,
            legs_max=1,
            host="",
            pid=os.getpid(),
            wire_version=WIRE_VERSION,
        )
        await self._bus.make_bucket(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
        registry = await self._bus.key_value_store(WORKER_RECORDS)
        while True:
            await registry.put(record)
            await asyncio.sleep(WORKER_RECORD_TTL_S / 4)

    async def connect(self, s_max: float) -> None:
        """Wait for the store's handshake, and connect to its memory."""
        ask = AskKvHandshake(worker_id=self.store, reader_id=ME)
        async with asyncio.timeout(s_max):
            while True:
                try:
                    self.handshake = await self._bus.ask(KV_HANDSHAKE, ask, timeout_s=self.answer_s_max)
                    break
                except BusError:
                    await asyncio.sleep(0.5)
            opening: Connecting = self._agent.connect(self.handshake.ranks[0].agent)
            while (name := opening.name()) is None:  # noqa: ASYNC110  # NIXL has no events
                await asyncio.sleep(POLL_S)
            self._peer = name

    async def insert(self, names: Sequence[bytes]) -> FetchedKv:
        """Have the store fetch a prompt with these blocks."""
        self._lent.names = list(names)
        for number, name in enumerate(names):
            self._memory[:, number] = content_of(name)
        order = FetchKv(
            worker_id=self.store,
            sender_id=ME,
            hashes=pack_full_hashes(names),
            sources=[KvSource(worker_id=ME, epoch=self.epoch)],
            deadline_s=self.answer_s_max,
        )
        return await self._bus.ask(KV_FETCH, order, timeout_s=2 * self.answer_s_max)

    async def look_up(self) -> set[int]:
        """Hashes of the blocks that the store says it has."""
        ask = AskKvSnapshot(worker_id=self.store, epoch=self.handshake.epoch)
        said: KvSnapshot = await self._bus.ask(KV_SNAPSHOT, ask, timeout_s=self.answer_s_max)
        return {*unpack_hashes(said.hashes + said.host_hashes + said.disk_hashes + said.object_hashes)}

    async def lease(self, names: Sequence[bytes], hold_s: float = 30.0) -> KvGrant:
        """Ask for a prompt with these blocks."""
        ask = self._ask(pack_full_hashes(names), hold_s)
        granted: asyncio.Future[KvGrant] = asyncio.get_running_loop().create_future()
        self._grants[ask.ask_id] = granted
        try:
            async with asyncio.timeout(self.answer_s_max):
                await self._bus.publish(KV_LEASE, ask)
                return await granted
        finally:
            del self._grants[ask.ask_id]

    async def release(self, grant: KvGrant) -> None:
        message = ReleaseKv(worker_id=self.store, epoch=grant.epoch, reader_id=ME, ask_ids=[grant.ask_id])
        await self._bus.publish(KV_RELEASE, message)

    async def send_malformed(self) -> None:
        """A request for a lease whose hashes cannot be read, and a release of one that nobody has. A store may be
        silent.
        """
        await self._bus.publish(KV_LEASE, self._ask(bytes(FULL_HASH_BYTES + 1), 1.0))
        unknown = ReleaseKv(worker_id=self.store, epoch=self.handshake.epoch, reader_id=ME, ask_ids=["unknown"])
        await self._bus.publish(KV_RELEASE, unknown)

    def _ask(self, hashes: bytes, hold_s: float) -> LeaseKv:
        epoch, ask_id = self.handshake.epoch, new_lease_id()
        return LeaseKv(worker_id=self.store, epoch=epoch, reader_id=ME, ask_id=ask_id, hashes=hashes, hold_s=hold_s)

    async def wrong(self, names: Sequence[bytes], grant: KvGrant) -> list[int]:
        """Read what was granted of this prompt; the numbers of the blocks that have other bytes than they must."""
        blocks = granted_blocks(grant)
        if not blocks:
            return []
        here = range(CHAIN_MAX, CHAIN_MAX + len(blocks))
        self._memory[:, CHAIN_MAX:] = 0
        for route in routes_to(ReaderRank(self._rank, ranks=1), self.handshake):
            remote, local = spans_of(route, blocks, list(here))
            reading = self._agent.read(self._peer, remote, local, device="cpu", remote_device="cpu")
            async with asyncio.timeout(self.answer_s_max):
                while (state := self._agent.state(reading)) is TransferState.RUNNING:  # noqa: ASYNC110  # NIXL has no events
                    await asyncio.sleep(POLL_S)
            self._agent.release(reading)
            if state is not TransferState.DONE:
                return list(range(len(blocks)))
        return [
            number
            for number, name in enumerate(names[: len(blocks)])
            if (self._memory[:, CHAIN_MAX + number] != content_of(name)).any()
        ]

    async def until(self, is_so: Any, s_max: float) -> bool:
        """Whether the store's load report says so within this time."""
        try:
            async with asyncio.timeout(s_max):
                while self.load is None or not is_so(self.load):
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._agent.close()

    async def _describe(self, _ask: AskKvHandshake, _envelope: Envelope) -> KvHandshake:
        return self.own

    async def _lend(self, ask: LeaseKv, _envelope: Envelope) -> None:
        await self._bus.publish(KV_GRANT, self._holder.lease(msgspec.structs.replace(ask, follow_s=0.0)))

    def _granted(self, grant: KvGrant, _envelope: Envelope) -> None:
        waiting = self._grants.get(grant.ask_id)
        if grant.final and waiting is not None and not waiting.done():
            waiting.set_result(grant)

    def _loaded(self, report: LoadReport, _envelope: Envelope) -> None:
        self.load = report
        self._reported.set()


def granted_blocks(grant: KvGrant) -> list[int]:
    """Numbers of the blocks in the store's memory."""
    return [block for group in grant.groups for block in unpack_block_ids(group.block_ids)]


def held_of(names: Sequence[bytes], known: set[int]) -> int:
    """Blocks at the beginning of a prompt that are known."""
    return next((number for number, name in enumerate(names) if block_hash64(name) not in known), len(names))
