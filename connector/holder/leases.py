"""What a holder has promised: which blocks stay, for whom, until when. It decides; others touch and free.

    offered ──┐                            ┌──► released   by its reader
    granted ──┼── each part until its own ─┤
    following ┘   instant                  └──► expired    by the holder's clock

A lease has parts, one for each grant: a prompt that is followed while it is computed is granted bit by bit. Every state
ends by itself: parts at their instant, followed at theirs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contracts.ids import WorkerId

LEASES_MAX = 4096
"""At once, offers included."""
FOLLOWED_MAX = 256
"""At once; each may name thousands of blocks."""
ANYONE = WorkerId("")
"""The reader of an offer: whoever names it."""
STALE_ENDS_MAX = 1024
"""Instants kept of parts that were released before them."""


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """How much may be promised."""

    pinned_blocks_max: int
    leases_max: int = LEASES_MAX
    followed_max: int = FOLLOWED_MAX


@dataclass(slots=True)
class FollowedPrompt:
    """An ask whose next blocks are granted as they are computed."""

    hashes: list[bytes]
    hold_s: float
    until_s: float
    follow_s: float = 0.0
    """How long to wait for the next block, from each grant on."""
    granted: int = 0
    """How many of the hashes, from the first on."""
    stuck_since_s: float = math.inf
    """Since when there is no memory for the next ones."""

    def progress(self, now: float, *, granted: bool) -> None:
        """The next ones were there: granted, with time for those after them, or not, for lack of memory."""
        self.stuck_since_s = math.inf if granted else min(self.stuck_since_s, now)
        if granted:
            self.until_s = now + self.follow_s


@dataclass(slots=True)
class Lease:
    """Over when it has neither parts nor a following."""

    lease_id: str
    reader_id: WorkerId
    """Who may release it."""
    parts: dict[int, list[int]] = field(default_factory=dict)
    """Blocks by number of the grant."""
    following: FollowedPrompt | None = None
    ever_granted: bool = False


@dataclass(slots=True)
class Totals:
    """Leases since the start. granted = released + expired + those that are held."""

    granted: int = 0
    released: int = 0
    expired: int = 0
    refused: int = 0


class LeaseTable:
    """All leases of one life of one engine. Every method that returns block ids returns what is to be freed."""

    def __init__(self, limits: LeaseLimits) -> None:
        self.totals = Totals()
        self.followed: dict[str, Lease] = {}
        """Those leases that are followed, by id."""
        self._limits = limits
        self._leases: dict[str, Lease] = {}
        self._pins: dict[int, int] = {}
        """How many parts pin each block."""
        self._ends: list[tuple[float, int, str]] = []
        """When each part ends, soonest first; some are released already."""
        self._parts = 0
        self._part_number = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pinned_blocks(self) -> int:
        """Blocks pinned at least once."""
        return len(self._pins)

    def find(self, lease_id: str) -> Lease | None:
        """The lease, while it lasts."""
        return self._leases.get(lease_id)

    def room_for(self, block_ids: Sequence[int]) -> int:
        """How many of these, from the first on, may be pinned for a lease; those pinned already cost nothing."""
        room = self._limits.pinned_blocks_max - len(self._pins)
        if len(block_ids) <= room:
            return len(block_ids)
        for count, block_id in enumerate(block_ids):
            if block_id not in self._pins:
                if room <= 0:
                    return count
                room -= 1
        return len(block_ids)

    def is_full(self) -> bool:
        """Whether no further lease may begin."""
        return len(self._leases) >= self._limits.leases_max

    def grant(self, lease_id: str, reader_id: WorkerId, block_ids: list[int], until_s: float) -> None:
        """Pin these blocks for a lease, new or known, until then. The caller has looked whether there is room."""
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = Lease(lease_id, reader_id)
        if not lease.ever_granted:
            lease.ever_granted = True
            self.totals.granted += 1
        self._part_number += 1
        lease.parts[self._part_number] = block_ids
        self._parts += 1
        heapq.heappush(self._ends, (until_s, self._part_number, lease_id))
        pins = self._pins
        for block_id in block_ids:
            pins[block_id] = pins.get(block_id, 0) + 1

    def follow(self, lease_id: str, reader_id: WorkerId, following: FollowedPrompt) -> bool:
        """Remember what an ask still waits for; False: too many are followed."""
        if len(self.followed) >= self._limits.followed_max:
            return False
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = Lease(lease_id, reader_id)
        lease.following = following
        self.followed[lease_id] = lease
        return True

    def stop_following(self, lease_id: str) -> None:
        """Nothing further is granted; what was granted stays as long as was said."""
        lease = self.followed.pop(lease_id, None)
        if lease is None:
            return
        lease.following = None
        if not lease.ever_granted:
            self.totals.refused += 1
        if not lease.parts:
            self._over(lease, expired=True)

    def release(self, lease_id: str, reader_id: WorkerId) -> list[int]:
        """End a lease and its following, if it is this reader's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.reader_id not in (ANYONE, reader_id):
            return []
        self.followed.pop(lease_id, None)
        freed = self._unpin_all_of(lease)
        self._over(lease, expired=False)
        self._forget_stale_ends()
        return freed

    def unpin_all(self) -> list[int]:
        """End every lease, but for the followed: their readers wait for a last word."""
        freed: list[int] = []
        for lease in list(self._leases.values()):
            if lease.following is None:
                freed += self.release(lease.lease_id, lease.reader_id)
            else:
                freed += self._unpin_all_of(lease)
        self._forget_stale_ends()
        return freed

    def next_expiry(self) -> float:
        """When the next part or following ends; infinity: there is none."""
        ends = self._ends
        while ends and not self._lasts(ends[0]):
            heapq.heappop(ends)
        first = ends[0][0] if ends else math.inf
        for lease in self.followed.values():
            if lease.following is not None:
                first = min(first, lease.following.until_s)
        return first

    def expire(self, now: float) -> list[int]:
        """End the parts whose time has come."""
        freed: list[int] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, part, lease_id = heapq.heappop(ends)
            lease = self._leases.get(lease_id)
            if lease is None or part not in lease.parts:
                continue
            freed += self._unpin(lease, part)
            if not lease.parts and lease.following is None:
                self._over(lease, expired=True)
        return freed

    def _lasts(self, end: tuple[float, int, str]) -> bool:
        lease = self._leases.get(end[2])
        return lease is not None and end[1] in lease.parts

    def _unpin(self, lease: Lease, part: int) -> list[int]:
        block_ids = lease.parts.pop(part)
        self._parts -= 1
        pins = self._pins
        for block_id in block_ids:
            left = pins[block_id] - 1
            if left:
                pins[block_id] = left
            else:
                del pins[block_id]
        return block_ids

    def _unpin_all_of(self, lease: Lease) -> list[int]:
        return [block_id for part in list(lease.parts) for block_id in self._unpin(lease, part)]

    def _over(self, lease: Lease, *, expired: bool) -> None:
        del self._leases[lease.lease_id]
        if not lease.ever_granted:
            return
        if expired:
            self.totals.expired += 1
        else:
            self.totals.released += 1

    def _forget_stale_ends(self) -> None:
        if len(self._ends) > 2 * self._parts + STALE_ENDS_MAX:
            self._ends = [end for end in self._ends if self._lasts(end)]
            heapq.heapify(self._ends)
