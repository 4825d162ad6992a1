"""A store's memory and files."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from connector.layout.routes import ReaderRank
from connector.layout.tensors import PROTOCOL_VERSION
from connector.messages import Orders, Results
from connector.transfer.agent import Region, TransferAgent
from connector.worker.connections import PROBE_BYTES, Own
from connector.worker.copier import Copier
from connector.worker.transfer_thread import TransferThread
from services.worker.engines.port import Identity
from services.worker.engines.simulated.kv_exchange import DirectMover, agent_name
from services.worker.engines.store.files import StoreFiles
from services.worker.engines.store.records import BlockShape
from services.worker.settings import Settings
from shared.contracts.kv_exchange import KvHandshake, KvRank


class Arena:
    """Memory for blocks, with room for connection probes after them. It never moves; pages are allocated on first
    write.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size + PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


@dataclass(frozen=True, slots=True)
class Storage:
    arena: Arena
    files: StoreFiles | None
    thread: ThreadPoolExecutor
    """Runs all calls of ``files``."""

    def as_text(self, blocks: int) -> str:
        """For the worker's note."""
        files = "none in files" if self.files is None else f"{self.files.slots} in files ({self.files.description})"
        return f"{blocks} blocks in memory, {files}"


class StoreMover(Protocol):
    """Carries out what a store's exchange orders."""

    rings: bool
    """Says itself when something has ended; otherwise it must be asked."""

    def submit(self, orders: Orders) -> None:
        """Accept orders."""

    def take_results(self) -> Results:
        """Results since the last call."""

    def close(self) -> None:
        """Abort running copies."""


MoverOf = Callable[[Identity, BlockShape, int, int, Callable[[], None]], tuple[StoreMover, KvHandshake]]
"""Makes a mover of: identity, block shape, address and number of the blocks, and a function that wakes the engine."""


class Threaded(TransferThread):
    """Copies on a thread of its own, which wakes the engine."""

    rings = True


class Direct(DirectMover):
    """Copies on the caller's thread, whenever it is polled: for agents that do not block."""

    rings = False


def mover_of(settings: Settings, engine: str) -> MoverOf:
    """What reaches that kind of engine."""
    transfer = settings.sim_transfer if engine == "simulated" else "nixl"
    if transfer == "auto":
        transfer = "nixl" if find_spec("nixl") else "tcp"
    if transfer == "nixl":
        from connector.transfer.nixl_agent import NixlAgent  # a machine for simulated workers may have no NIXL

        return threaded(NixlAgent)
    if transfer == "tcp":
        from services.worker.engines.simulated.tcp_agent import TcpAgent

        return threaded(lambda name: TcpAgent(name, settings.kv_host))
    raise ValueError(f"WORKER_SIM_TRANSFER={transfer}: a store needs nixl or tcp")


def threaded(make_agent: Callable[[str], TransferAgent]) -> MoverOf:
    """Around agents that take their time."""

    def make(
        identity: Identity, shape: BlockShape, base: int, blocks: int, ring: Callable[[], None]
    ) -> tuple[StoreMover, KvHandshake]:
        agent = make_agent(agent_name(identity.worker_id, identity.epoch))
        own = introduce(agent, identity, shape, base, blocks)
        mover = Threaded(lambda: Copier(agent, own, time.monotonic))
        mover.wake_on_results(ring)
        return mover, own.handshake

    return make


def direct(make_agent: Callable[[str], TransferAgent]) -> MoverOf:
    """Around agents of this process."""

    def make(
        identity: Identity, shape: BlockShape, base: int, blocks: int, _ring: Callable[[], None]
    ) -> tuple[StoreMover, KvHandshake]:
        agent = make_agent(agent_name(identity.worker_id, identity.epoch))
        own = introduce(agent, identity, shape, base, blocks)
        return Direct(Copier(agent, own, time.monotonic)), own.handshake

    return make


def introduce(agent: TransferAgent, identity: Identity, shape: BlockShape, base: int, blocks: int) -> Own:
    """Make the blocks readable, and say so in a handshake. Behind them there is a place for probes."""
    size = blocks * shape.block_bytes
    agent.register([Region(base, size + PROBE_BYTES, "cpu", 0)])
    rank = KvRank(rank=0, agent=agent.metadata(), device="cpu", device_id=0, layers=shape.at(base))
    handshake = KvHandshake(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        version=PROTOCOL_VERSION,
        fingerprint=shape.fingerprint,
        clock_s=0.0,
        block_size=shape.block_tokens,
        blocks=blocks,
        kv_heads=shape.kv_heads,
        ranks=[rank],
    )
    return Own(ReaderRank(rank, ranks=1, kv_heads=shape.kv_heads), handshake, base + size)
