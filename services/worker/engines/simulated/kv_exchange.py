"""The simulated engine's KV exchange: implements ``EngineExchange``, and moves block contents between engines.

A mover is the connector's copier with a transfer agent (memory, TCP or NIXL), on the engine's thread or on its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

from connector.layout.routes import ReaderRank
from connector.layout.tensors import PROTOCOL_VERSION
from connector.messages import EngineCall, EngineNotification, Orders, Results
from connector.transfer.agent import Region, TransferAgent
from connector.transfer.memory_agent import MemoryNetwork
from connector.worker.connections import PROBE_BYTES, Own
from connector.worker.copier import Copier
from connector.worker.transfer_thread import TransferThread
from services.worker.engines.port import EngineDead
from services.worker.engines.simulated.core.block_cache import CONTENT_BYTES
from services.worker.engines.simulated.core.engine_core import EngineCore
from services.worker.engines.simulated.tcp_agent import TcpAgent
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvHandshake, KvLayer, KvPlane, KvRank

assert CONTENT_BYTES == PROBE_BYTES, "the space after the last block is for probes"

POLL_S = 0.002
"""Interval of polls while a thread moves blocks."""
THIS_PROCESS = MemoryNetwork()
"""Simulated engines of one process reach each other without NIXL."""

MakeAgent = Callable[[str], TransferAgent]
"""Its argument is the agent's name, which is never reused."""


class Mover(Protocol):
    """Executes the orders of an engine's exchange."""

    def submit(self, orders: Orders) -> None:
        """Start these orders."""

    def take_results(self) -> Results:
        """Results since the last call."""

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, possibly on another thread, when there are results. Without a thread there are none before
        ``take_results`` is called.
        """

    def close(self) -> None:
        """Abort transfers."""


class DirectMover:
    """Copies on the caller's thread when polled, for agents that never block and for virtual time."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def submit(self, orders: Orders) -> None:
        """Start these orders."""
        self._copier.submit(orders)

    def take_results(self) -> Results:
        """Results since the last call."""
        self._copier.advance()
        return self._copier.take_results()

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """See ``Mover``."""

    def close(self) -> None:
        """Abort transfers."""
        self._copier.close()


def direct_mover(core: EngineCore, agent: TransferAgent, fingerprint: str, clock: Callable[[], float]) -> DirectMover:
    """A mover on the caller's thread. Registers the engine's memory."""
    return DirectMover(Copier(agent, _register_blocks(core, agent, fingerprint), clock))


def threaded_mover(
    core: EngineCore, agent: TransferAgent, fingerprint: str, clock: Callable[[], float]
) -> TransferThread:
    """A mover on a separate thread, for agents that block. Registers the engine's memory."""
    own = _register_blocks(core, agent, fingerprint)
    return TransferThread(lambda: Copier(agent, own, clock))


def agent_name(worker_id: str, epoch: int) -> str:
    """A unique name: peers identify connections by it."""
    return f"{worker_id}-{epoch}-{uuid.uuid4().hex[:8]}"


def _register_blocks(core: EngineCore, agent: TransferAgent, fingerprint: str) -> Own:
    """Register the contents of the engine's blocks with the agent, and set the engine's handshake."""
    settings, cache = core.settings, core.cache
    size = CONTENT_BYTES * settings.kv_blocks
    agent.register([Region(cache.address, size + PROBE_BYTES, "cpu", 0)])
    plane = KvPlane(offset=0, head_bytes=CONTENT_BYTES, heads=1)
    layer = KvLayer(base=cache.address, block_stride=CONTENT_BYTES, planes=[plane])
    memory = KvRank(rank=0, agent=agent.metadata(), device="cpu", device_id=0, layers=[layer])
    handshake = KvHandshake(
        worker_id=WorkerId(settings.worker_id),
        epoch=Epoch(settings.epoch),
        version=PROTOCOL_VERSION,
        fingerprint=fingerprint,
        clock_s=0.0,
        block_size=settings.block_size,
        blocks=settings.kv_blocks,
        kv_heads=1,
        ranks=[memory],
    )
    core.exchange.describe(handshake)
    return Own(ReaderRank(memory, ranks=1, kv_heads=1), handshake, cache.address + size)


def open_mover(core: EngineCore, fingerprint: str, clock: Callable[[], float]) -> Mover:
    """The mover that the settings choose; the engine closes it."""
    settings = core.settings
    name = agent_name(settings.worker_id, settings.epoch)
    if settings.sim_transfer == "nixl":
        from connector.transfer.nixl_agent import NixlAgent  # A machine for simulated workers may have no NIXL.

        return threaded_mover(core, NixlAgent(name), fingerprint, clock)
    if settings.sim_transfer == "tcp":
        return threaded_mover(core, TcpAgent(name, settings.host), fingerprint, clock)
    return direct_mover(core, THIS_PROCESS.agent(name), fingerprint, clock)


class SimulatedExchange:
    """An ``EngineExchange``. The engine's loop calls ``poll``."""

    def __init__(self, core: EngineCore, mover: Mover, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._core = core
        self._mover = mover
        self._clock = clock
        self._wake = wake
        self._listeners: list[Callable[[EngineNotification], None]] = []
        self._closed = False

    async def call(self, call: EngineCall) -> EngineNotification:
        """Returns immediate results; later ones arrive as notifications. Raises EngineDead."""
        if self._closed:
            raise EngineDead("the engine was closed")
        notifications = self._core.call(call, self._clock())
        self._wake()
        return notifications

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        self._listeners.append(listener)

    def poll(self) -> bool:
        """Run the mover and deliver notifications; returns whether the core got results and must advance again."""
        orders = self._core.exchange.take_orders()
        if orders:
            self._mover.submit(orders)
        results = self._mover.take_results() if self.moving or orders else None
        if results:
            self._core.results(results, self._clock())
        notifications = self._core.exchange.take_notifications()
        if notifications is not None:
            for listener in self._listeners:
                listener(notifications)
        return bool(results)

    @property
    def moving(self) -> bool:
        """Whether blocks are being moved."""
        return self._core.exchange.moving

    def close(self) -> None:
        """Abort transfers; later calls raise EngineDead."""
        self._closed = True
        self._mover.close()
