"""Places for work of which only so much may run at once, given to tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoTurn(Exception):
    """Too much work waits, its client has left, or the process ends."""


class FairSlots:
    """``count`` places. Those of one tenant that wait come in order; tenants take turns."""

    def __init__(self, count: int, *, waiting_max: int, tenant_waiting_max: int) -> None:
        self._free = count
        self._waiting_max = waiting_max
        self._tenant_waiting_max = tenant_waiting_max
        self._count = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by tenant, the next one first."""

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a place, and leaves it at the end. Raises NoTurn when too many wait."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(tenant)
        try:
            yield
        finally:
            self._leave()

    async def _turn(self, tenant: str) -> None:
        queue = self._waiting.get(tenant, deque())
        if self._count >= self._waiting_max or len(queue) >= self._tenant_waiting_max:
            raise NoTurn
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[tenant] = queue
        queue.append(turn)
        self._count += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # It was given a place at the same moment.
            raise

    def _leave(self) -> None:
        """The next one that still waits gets the place."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            self._count -= 1
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
