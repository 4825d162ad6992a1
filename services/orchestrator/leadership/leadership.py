"""Who leads: claim the empty seat, renew before the lease ends, fall silent when it could not be renewed in time.

The lease is counted from before a claim or renewal was asked for; the server counts from when it was written, which is
later. So a leader falls silent (``may_lead``) before the seat can be empty: that is the fence.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.control import Leadership

LEASE_MARGIN = 0.1
"""Part of the lease that a leader does not use: the clocks of two machines do not run alike."""
RENEWALS_PER_LEASE = 4


@dataclass(frozen=True, slots=True)
class Look:
    """Read the seat."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Write this, only if the seat is empty."""

    value: Leadership


@dataclass(frozen=True, slots=True)
class Renew:
    """Write this, only over that revision."""

    value: Leadership
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim of ours that was written."""

    term: int
    revision: int
    asked_at: float


class Candidate:
    """One orchestrator before the seat. ``name`` belongs to one life of one process. Times are monotonic seconds."""

    def __init__(self, role: str, name: str, lease_s: float) -> None:
        self.role = role
        self.name = name
        self.lease_s = lease_s
        self.term = 0
        """The one led in, or the last one seen."""
        self._lease: Lease | None = None
        self._doubted = False
        self._next: Claim | Renew | None = None
        """What the last look asks for."""

    def may_lead(self, now: float) -> bool:
        """Whether this one leads at ``now`` for certain."""
        return (
            self._lease is not None
            and not self._doubted
            and now < self._lease.asked_at + self.lease_s * (1.0 - LEASE_MARGIN)
        )

    def due(self, now: float) -> Look | Claim | Renew | None:
        """What to do now; None is to wait."""
        if self._lease is None:
            return self._next or Look()
        if not self._doubted and now < self._lease.asked_at + self.lease_s / RENEWALS_PER_LEASE:
            return None
        return Renew(self._words(self._lease.term), self._lease.revision)

    def heard(self, term: int) -> None:
        """Somebody spoke as the leader of ``term``: the seat forgets, those who listen do not. Whoever led before has
        lost its lease, whether it knows already or not.
        """
        if term > self.term:
            self.term = term
            self._next = self._lease = None

    def doubt(self) -> None:
        """The server was away and may have forgotten the lease: lead again only when a renewal has proved it."""
        self._doubted = True

    def saw(self, value: Leadership | None, revision: int) -> None:
        """The seat as it was read: None is empty."""
        self.term = max(self.term, value.term if value else 0)
        if value is None:
            self._next = Claim(self._words(self.term + 1))
        elif value.leader == self.name:
            # A write of ours whose answer never came. Writing over it proves that it still holds.
            self._next = Renew(self._words(value.term), revision)
        else:
            self._next = None

    def written(self, order: Claim | Renew, revision: int, asked_at: float) -> None:
        """``order`` was carried out; it was asked for at ``asked_at``."""
        self.term = order.value.term
        self._lease = Lease(order.value.term, revision, asked_at)
        self._doubted = False
        self._next = None

    def refused(self) -> None:
        """Somebody else wrote first, or the lease has ended: look again."""
        self._lease = None
        self._next = None

    def _words(self, term: int) -> Leadership:
        return Leadership(role=self.role, leader=self.name, term=term)
