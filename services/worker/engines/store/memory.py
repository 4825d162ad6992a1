"""A store's memory and files, the movers that copy blocks of other workers into that memory, and the jobs that copy
blocks between memory and files, one at a time, on a separate thread.

A mover is the connector's copier with a transfer agent. It also registers the memory, so that peers can read it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from connector.layout.routes import ReaderRank
from connector.layout.tensors import PROTOCOL_VERSION
from connector.transfer.agent import Region, TransferAgent
from connector.worker.connections import PROBE_BYTES, Own
from connector.worker.transfer_thread import Copier, TransferThread
from services.worker.engines.port import Identity
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.simulated.kv_exchange import agent_name
from services.worker.engines.store.files import StoreFiles
from services.worker.engines.store.kv_exchange import StoreExchange
from services.worker.engines.store.port import StoreMemory
from services.worker.engines.store.records import BlockShape
from services.worker.engines.store.tiers import Job
from services.worker.settings import Settings
from shared.contracts.kv_exchange import KvHandshake, KvRank

log = logging.getLogger("baton.worker")


class Arena:
    """Memory for blocks, followed by space for connection probes. Its address never changes; the system allocates pages
    on first write.
    """

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size + PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class HostMemory(BlockCache):
    """Blocks in host memory, of which the least recently used is dropped first: a ``StoreMemory``."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        super().__init__(blocks)
        self._arena = Arena(blocks * block_bytes)

    @property
    def address(self) -> int:
        return self._arena.address


@dataclass(frozen=True, slots=True)
class Storage:
    memory: StoreMemory
    files: StoreFiles | None
    thread: ThreadPoolExecutor

    def as_text(self) -> str:
        files = "none in files" if self.files is None else f"{self.files.slots} in files ({self.files.description})"
        return f"{self.memory.blocks} blocks in memory, {files}"


MoverOf = Callable[[Identity, BlockShape, int, int, Callable[[], None]], tuple[TransferThread, KvHandshake]]
"""Makes a mover and its handshake. Arguments: identity, shape, address and number of the blocks; called on results."""


def transfer_of(settings: Settings, engine: str) -> str:
    """How workers with that kind of engine move KV."""
    transfer = settings.profile.transfer if engine == "simulated" else "nixl"
    if transfer == "auto":
        return "nixl" if find_spec("nixl") else "tcp"
    return transfer


def mover_of(transfer: str, host: str, backend: str) -> MoverOf:
    """The mover for workers that move KV in that way, with NIXL by that plug-in. Raises ValueError for a way that a
    store cannot use.
    """
    if transfer == "nixl":
        from connector.transfer.nixl_agent import NixlAgent  # a machine for simulated workers may have no NIXL

        return threaded(partial(NixlAgent, backend=backend))
    if transfer == "tcp":
        from services.worker.engines.simulated.kv_exchange import TcpAgent

        return threaded(lambda name: TcpAgent(name, host))
    raise ValueError(f"WORKER_SIMULATED: transfer={transfer}: a store needs nixl or tcp")


def threaded(make_agent: Callable[[str], TransferAgent]) -> MoverOf:
    """For agents that block."""

    def make(
        identity: Identity, shape: BlockShape, base: int, blocks: int, wake: Callable[[], None]
    ) -> tuple[TransferThread, KvHandshake]:
        agent = make_agent(agent_name(identity.worker_id, identity.epoch))
        own = register_blocks(agent, identity, shape, base, blocks)
        mover = TransferThread(lambda: Copier(agent, own, time.monotonic))
        mover.wake_on_results(wake)
        return mover, own.handshake

    return make


def register_blocks(agent: TransferAgent, identity: Identity, shape: BlockShape, base: int, blocks: int) -> Own:
    """Register the blocks, and the space for probes after them, with the agent; make the handshake."""
    size = blocks * shape.block_bytes
    agent.register([Region(base, size + PROBE_BYTES, "cpu", 0)])
    rank = KvRank(rank=0, agent=agent.metadata(), device="cpu", device_id=0, layers=shape.at(base))
    handshake = KvHandshake(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        version=PROTOCOL_VERSION,
        fingerprint=shape.fingerprint,
        clock_s=0.0,
        hash_block_size=shape.hash_block_size,
        alignment=shape.alignment,
        beyond=shape.beyond,
        groups=list(shape.groups),
        blocks=blocks,
        ranks=[rank],
    )
    return Own(ReaderRank(rank, ranks=1), handshake, base + size)


class FileJobs:
    """Runs the jobs of one tier below memory. Calls ``wake`` after each, and ``fail`` with a reason when it fails."""

    def __init__(
        self,
        core: StoreExchange,
        storage: Storage,
        below: int,
        *,
        wake: Callable[[], None],
        fail: Callable[[str], None],
    ) -> None:
        """``below``: number of the tier."""
        self._core = core
        self._storage = storage
        self._below = below
        self._wake_loop = wake
        self._fail = fail
        self._under_way: asyncio.Future[list[bytes]] | None = None
        self._broken = False

    def begin(self) -> bool:
        """Start the next job if none is running; returns whether one is running now."""
        if self._under_way is not None and not self._under_way.done():
            return True
        files = None if self._broken else self._storage.files
        job = None if files is None else self._core.next_job(self._below)
        if files is None or job is None:
            return False
        loop = asyncio.get_running_loop()
        self._under_way = loop.run_in_executor(self._storage.thread, files.perform, job)
        self._under_way.add_done_callback(lambda done: self._ended(job, done))
        return True

    async def finish(self) -> None:
        """Run jobs until none is left."""
        while self.begin() and self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def close(self) -> None:
        if self._storage.files is not None:
            self._storage.thread.submit(self._storage.files.close, self._core.tiers.below[self._below].slots.records())
        await asyncio.to_thread(self._storage.thread.shutdown)

    def disk_free_bytes(self) -> int:
        """Free space of the file system, without root's reserve; -1 if there are no files or it is unknown."""
        if self._storage.files is None:
            return -1
        try:
            stat = os.statvfs(self._storage.files.folder)
        except OSError:
            return -1
        return stat.f_bavail * stat.f_frsize

    def _ended(self, job: Job, done: asyncio.Future[list[bytes]]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self._broken = True
            self._fail(f"the store's files cannot be used any more: {error!r}")
            return
        known = self._core.tiers.counts.damaged
        self._core.ended(job, done.result(), self._below)
        if damaged := self._core.tiers.counts.damaged - known:
            log.warning("%d blocks in files failed their checksums and were dropped", damaged)
        self._wake_loop()
