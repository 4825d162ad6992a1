"""Leader election: claim the missing entry, renew it before the lease ends, stop leading when a renewal is late.

A candidate counts the lease from before its claim or renewal is sent; the server counts from the write, which is later.
So a leader stops leading (``may_lead``) before the entry can expire: that is the fence.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from shared.bus.outage import Outage
from shared.bus.port import BusError, KeyValueStore, WrongRevision
from shared.contracts.control import Leadership
from shared.runtime.clock import Clock

LEASE_MARGIN = 0.1
"""Part of the lease that a leader does not use: clocks of two machines run at slightly different rates."""
RENEWALS_PER_LEASE = 4


@dataclass(frozen=True, slots=True)
class Read:
    """Read the entry."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Write this only if there is no entry."""

    value: Leadership


@dataclass(frozen=True, slots=True)
class Renew:
    """Write this only over that revision."""

    value: Leadership
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A written claim of this candidate."""

    term: int
    revision: int
    requested_at: float


class Candidate:
    """One orchestrator in the election. ``name`` is unique to one process. Times are monotonic seconds."""

    def __init__(self, role: str, name: str, lease_s: float) -> None:
        self.role = role
        self.name = name
        self.lease_s = lease_s
        self.term = 0
        """The own term while leading, else the last known one."""
        self._lease: Lease | None = None
        self._doubted = False
        self._next: Claim | Renew | None = None
        """The write that follows from the last read."""

    def may_lead(self, now: float) -> bool:
        """Whether this candidate certainly leads at ``now``."""
        return (
            self._lease is not None
            and not self._doubted
            and now < self._lease.requested_at + self.lease_s * (1.0 - LEASE_MARGIN)
        )

    def due(self, now: float) -> Read | Claim | Renew | None:
        """The next action; None: wait."""
        if self._lease is None:
            return self._next or Read()
        if not self._doubted and now < self._lease.requested_at + self.lease_s / RENEWALS_PER_LEASE:
            return None
        return Renew(self._entry(self._lease.term), self._lease.revision)

    def heard(self, term: int) -> None:
        """Another orchestrator has published as the leader of ``term``. The leader of an earlier term has lost its
        lease, even if the server has lost the entry.
        """
        if term > self.term:
            self.term = term
            self._next = self._lease = None

    def doubt(self) -> None:
        """The server was away and may have lost the lease: lead again only after a successful renewal."""
        self._doubted = True

    def saw(self, value: Leadership | None, revision: int) -> None:
        """The entry as read; None: there is none."""
        self.term = max(self.term, value.term if value else 0)
        if value is None:
            self._next = Claim(self._entry(self.term + 1))
        elif value.leader == self.name:
            # An own write whose reply was lost. Writing over it proves that it still holds.
            self._next = Renew(self._entry(value.term), revision)
        else:
            self._next = None

    def written(self, order: Claim | Renew, revision: int, requested_at: float) -> None:
        """``order`` succeeded; it was sent at ``requested_at``."""
        self.term = order.value.term
        self._lease = Lease(order.value.term, revision, requested_at)
        self._doubted = False
        self._next = None

    def refused(self) -> None:
        """Another orchestrator wrote first, or the lease has ended: read again."""
        self._lease = None
        self._next = None

    def _entry(self, term: int) -> Leadership:
        return Leadership(role=self.role, leader=self.name, term=term)


# What ``Candidate`` asks for is carried out: reads, claims, renewals and at the end the deletion of the entry.

READ_S = 0.5
"""Interval of reads of the entry."""
ENTRY_S_MAX = 1.5
"""Time limit for one read or write of the entry."""

log = logging.getLogger(__name__)


async def stand_for_leadership(
    candidate: Candidate, store: KeyValueStore[Leadership], clock: Clock, stopping: asyncio.Event
) -> None:
    """Keep ``candidate`` up to date until ``stopping``; then delete the entry, so that a standby leads at once."""
    outage = Outage(log)
    while not stopping.is_set():
        await _step(candidate, store, clock, outage)
        await _pause(stopping, READ_S)
    if candidate.may_lead(clock.now()):
        candidate.refused()
        try:
            async with asyncio.timeout(ENTRY_S_MAX):
                await store.delete(candidate.role)
        except (BusError, TimeoutError) as error:
            log.warning("cannot delete the leadership entry, it will expire: %s", error)


async def _step(candidate: Candidate, store: KeyValueStore[Leadership], clock: Clock, outage: Outage) -> None:
    try:
        async with asyncio.timeout(ENTRY_S_MAX):
            if isinstance(candidate.due(clock.now()), Read):
                found = await store.get(candidate.role)
                candidate.saw(found.value if found else None, found.revision if found else 0)
            requested_at = clock.now()
            match candidate.due(requested_at):
                case Claim() as claim:
                    candidate.written(claim, await store.create(claim.value), requested_at)
                    log.info("leading in term %d", candidate.term)
                case Renew() as renew:
                    candidate.written(renew, await store.update(renew.value, renew.revision), requested_at)
        outage.over()
    except WrongRevision:
        candidate.refused()
    except (BusError, TimeoutError) as error:
        # The lease continues meanwhile. When it ends, this orchestrator stops leading by itself.
        outage.failed("cannot reach the leadership entry", error)


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
