"""The simulated engine's KV exchange behind its port: calls in, notifications out, blocks copied."""

from __future__ import annotations

from collections.abc import Callable

from connector.messages import EngineCall, EngineNotification
from connector.transfer.memory_agent import MemoryNetwork
from services.worker.engines.port import EngineDead
from services.worker.engines.simulated.core.engine_core import EngineCore
from services.worker.engines.simulated.mover import Mover, agent_name, direct_mover, threaded_mover
from services.worker.engines.simulated.tcp_agent import TcpAgent

POLL_S = 0.002
"""Between polls while a thread moves blocks."""
THIS_PROCESS = MemoryNetwork()
"""Simulated engines of one process reach each other without NIXL."""


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
    """An ``EngineExchange``. The engine's loop calls ``turn``."""

    def __init__(self, core: EngineCore, mover: Mover, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._core = core
        self._mover = mover
        self._clock = clock
        self._wake = wake
        self._listeners: list[Callable[[EngineNotification], None]] = []
        self._closed = False

    async def call(self, call: EngineCall) -> EngineNotification:
        """Runs at once; later results come as notifications. Raises EngineDead."""
        if self._closed:
            raise EngineDead("the engine was closed")
        notifications = self._core.call(call, self._clock())
        self._wake()
        return notifications

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        """See the port."""
        self._listeners.append(listener)

    def turn(self) -> bool:
        """Run the mover and pass on notifications; returns whether the engine must look again."""
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
        """Nothing moves any more."""
        self._closed = True
        self._mover.close()
