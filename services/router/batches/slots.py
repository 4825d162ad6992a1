"""The slots of batches: one for each line that a router serves. Tenants share them, whoever has more lines or batches.

A free slot goes to the waiting tenant that holds the fewest. A tenant may hold all of them while it is alone; then
others need not wait until its lines end, because further slots are for tenants that hold few.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

GAP_CHECK_S = 0.05
"""Interval of checks whether lines may be served, while some wait."""
RESERVED_SHARE = 2
"""Half as many slots again are for tenants that hold fewer than those: beside any other, 20 lines take two turns."""


def fits(total: int, own: int, most: int) -> bool:
    """Whether a tenant that holds ``own`` of ``total`` may hold one more, where ``most`` are shared by all."""
    reserved = max(1, most // RESERVED_SHARE)
    return most > 0 and (total < most or (own < reserved and total < most + reserved))


class Slots:
    """A router's."""

    def __init__(
        self, most: int, running_max: Callable[[], int], may_begin: Callable[[str], bool] = lambda _tenant: True
    ) -> None:
        """``most`` may be held, and ``running_max()`` of them have no answer yet. ``may_begin``: whether a line of this
        tenant may be served now.
        """
        self.most = most
        self._running_max = running_max
        self._may_begin = may_begin
        self._held: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[Slot]] = {}
        """Slots that lines wait for, by tenant, the longest wait first."""
        self._timer: asyncio.TimerHandle | None = None

    def slot(self, tenant: str) -> Slot:
        """A slot that is not held yet."""
        return Slot(self, tenant)

    def held_by(self, tenant: str) -> int:
        return self._held[tenant]

    def wait(self, slot: Slot) -> None:
        """Have the slot granted, perhaps before this returns."""
        self._waiting.setdefault(slot.tenant, deque()).append(slot)
        self.grant()

    def withdraw(self, slot: Slot) -> None:
        waiting = self._waiting[slot.tenant]
        waiting.remove(slot)
        if not waiting:
            del self._waiting[slot.tenant]

    def count(self, slot: Slot, *, held: int = 0, running: int = 0) -> None:
        """The slot was granted, answered or given back."""
        for counts, change in ((self._held, held), (self._running, running)):
            counts[slot.tenant] += change
            if not counts[slot.tenant]:
                del counts[slot.tenant]

    def grant(self) -> None:
        """Grant what may be granted now, and look again soon if lines still wait."""
        while self._waiting and (tenant := self._next()) is not None:
            slot = self._waiting[tenant][0]
            self.withdraw(slot)
            slot.granted()
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GAP_CHECK_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.grant()

    def _next(self) -> str | None:
        """The tenant that gets the next slot."""
        held, running, running_max = self._held.total(), self._running.total(), self._running_max()
        able = [
            tenant
            for tenant in self._waiting
            if fits(held, self._held[tenant], self.most)
            and fits(running, self._running[tenant], running_max)
            and self._may_begin(tenant)
        ]
        return min(able, key=lambda tenant: self._held[tenant], default=None)


class Slot:
    """A line's. ``take`` it to ask an engine, give it back while the line waits, and when its result is stored."""

    __slots__ = ("_granted", "_slots", "is_held", "is_limited", "is_running", "tenant")

    def __init__(self, slots: Slots, tenant: str) -> None:
        self._slots = slots
        self._granted: asyncio.Future[None] | None = None
        self.tenant = tenant
        self.is_held = False
        self.is_running = False
        """The line has no answer yet."""
        self.is_limited = False
        """The line waits because its key has reached a limit."""

    async def take(self, stopping: asyncio.Event) -> bool:
        """Wait for the slot. False: ``stopping`` was set before."""
        if stopping.is_set():
            return False
        granted = self._granted = asyncio.get_running_loop().create_future()
        self._slots.wait(self)
        if self.is_held:
            return True
        stopped = asyncio.create_task(stopping.wait(), name="stop a waiting line")
        try:
            await asyncio.wait((granted, stopped), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.give_back()
            raise
        finally:
            stopped.cancel()
        if stopping.is_set():
            self.give_back()
        return self.is_held

    def granted(self) -> None:
        assert self._granted is not None
        self._granted.set_result(None)
        self._granted = None
        self.is_held = self.is_running = True
        self._slots.count(self, held=1, running=1)

    def answered(self) -> None:
        """The result is there, and not stored yet."""
        if self.is_running:
            self.is_running = False
            self._slots.count(self, running=-1)
            self._slots.grant()

    def give_back(self) -> None:
        """The slot is free for others, or no longer wanted; does nothing if it is not held."""
        if self._granted is not None:
            self._granted = None
            self._slots.withdraw(self)
        elif self.is_held:
            self._slots.count(self, held=-1, running=-int(self.is_running))
            self.is_held = self.is_running = False
            self._slots.grant()
