"""What orders to workers have in common: they are taken while this orchestrator leads, one at a time, and an order does
not wait for a worker that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError, Subscription
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import FleetWorker, WorkerPhase
from shared.runtime.clock import Clock

CHECK_S = 1.0
TRIES_MAX = 3
"""Attempts to repeat an order in one life of a worker that started after it."""
ENDED = "it ended meanwhile"
OVER = frozenset({WorkerPhase.GONE, WorkerPhase.LOST})

log = logging.getLogger(__name__)
T = TypeVar("T")


class OrderRefused(Exception):
    """The order cannot be carried out; the message says why and what to do."""


class NoReply(Exception):
    """Why a worker has not replied; ``ENDED`` if it has ended."""


class WorkerOrders(ABC):
    """Answers operators while this orchestrator leads."""

    about: str
    """What the orders are about, for the log."""

    def __init__(
        self, bus: Bus, clock: Clock, fleet: Callable[[], list[FleetWorker]], *, leading: Callable[[], bool]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._leading = leading
        self._changing = asyncio.Lock()
        """Held while an order is carried out."""
        self._subscriptions: list[Subscription] = []
        """Held while leading."""

    @abstractmethod
    async def _begin(self) -> list[Subscription]:
        """Read what is wanted, and take orders."""

    @abstractmethod
    async def _repeat(self) -> None:
        """Have workers carry out what they lack."""

    async def run(self) -> None:
        """Take orders while leading, and repeat them where they are missing; until cancelled."""
        outage = Outage(log)
        while True:
            try:
                await (self._lead() if self._leading() else self._stand_by())
                outage.over()
            except BusError as error:
                outage.failed(f"cannot check the workers' {self.about}", error)
            await asyncio.sleep(CHECK_S)

    async def _lead(self) -> None:
        if not self._subscriptions:
            self._subscriptions = await self._begin()
        if not self._changing.locked():  # An order that is being carried out will be seen in the records.
            await self._repeat()

    async def _stand_by(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for one in subscriptions:
            await one.close()

    async def _reply(self, asked: Coroutine[Any, Any, T], worker_id: WorkerId) -> T:
        """What the worker replies. Raises NoReply, also when the worker ends before that."""
        epoch = self._epoch(worker_id)
        asking = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait([asking], timeout=CHECK_S))[0]:
                if self._epoch(worker_id) != epoch:
                    raise NoReply(ENDED)
            return asking.result()
        except BusError as error:
            raise NoReply(f"it does not reply: {error or type(error).__name__}") from error
        finally:
            asking.cancel()

    def _epoch(self, worker_id: WorkerId) -> Epoch | None:
        """The epoch of the worker's life; None if it has ended."""
        alive = (each.record for each in self._fleet() if each.phase not in OVER)
        return next((record.epoch for record in alive if record.worker_id == worker_id), None)
