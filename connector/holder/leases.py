"""The table of leases: which blocks are pinned, for which reader, until when. Callers pin and free the blocks.

    offered ───┐                           ┌──► released   by its reader
    granted ───┼── each grant until its ───┤
    followed ──┘   own expiry              └──► expired    by the holder's clock

A lease has one grant or several: a prompt that is followed while it is computed is granted chunk by chunk. Grants and
followed prompts each have an expiry, so a lost release or a dead reader never keeps blocks pinned.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contracts.ids import NO_LEG, LegId, WorkerId

LEASES_MAX = 4096
"""Leases at a time, offers included."""
FOLLOWED_MAX = 256
"""Followed prompts at a time. After each step every one is checked for new blocks, and each names thousands."""
ANYONE = WorkerId("")
"""Reader of an offer: the router has not chosen it yet, so any reader that knows the lease id may release it."""
STALE_ENDS_MAX = 1024
"""Entries of released grants in the heap of expiries above which it is rebuilt."""


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    pinned_blocks_max: int
    leases_max: int = LEASES_MAX
    followed_max: int = FOLLOWED_MAX


@dataclass(slots=True)
class FollowedPrompt:
    """A lease request whose next blocks are granted as they are computed. Instants are on the holder's clock."""

    hashes: list[bytes]
    hold_s: float
    until_s: float
    full_tokens: int
    """End of the full attention that the reader has or was granted so far."""
    end: int
    """Tokens beyond which nothing is granted."""
    follow_s: float = 0.0
    """Maximum wait for the next block after each grant."""
    leg_id: LegId = NO_LEG
    """The leg that computes the blocks; empty if the reader does not name it."""
    first: int = 0
    """``LeaseKv.first``."""
    stuck_since_s: float = math.inf
    """Time from which the next blocks are there and could not be pinned."""
    is_blocked: bool = False
    """There is a boundary that may not be pinned yet: blocks are still written, or the limits do not allow it."""

    def progress(self, now: float, *, granted: bool) -> None:
        """The next blocks were there: granted, which restarts the wait, or not."""
        self.stuck_since_s = math.inf if granted else min(self.stuck_since_s, now)
        if granted:
            self.until_s = now + self.follow_s


@dataclass(slots=True)
class Lease:
    """Ends when it has neither grants nor a followed prompt."""

    lease_id: str
    reader_id: WorkerId
    """Only this reader may release it."""
    grants: dict[int, list[int]] = field(default_factory=dict)
    """Block ids by number of the grant."""
    groups: list[Sequence[list[int]]] = field(default_factory=list)
    """The blocks of each grant by KV cache group; none once a grant has ended."""
    boundary: int = 0
    """Tokens at which every group has what it needs, with all grants."""
    followed: FollowedPrompt | None = None
    ever_granted: bool = False


@dataclass(slots=True)
class Totals:
    """Leases since the start. granted = released + expired + current ones."""

    granted: int = 0
    released: int = 0
    expired: int = 0
    refused: int = 0


class LeaseTable:
    """All leases of one epoch of one engine. Block ids that a method returns are to be freed by the caller."""

    def __init__(self, limits: LeaseLimits) -> None:
        self.totals = Totals()
        self.followed: dict[str, Lease] = {}
        """Leases with a followed prompt, by id."""
        self._limits = limits
        self._leases: dict[str, Lease] = {}
        self._pins: dict[int, int] = {}
        """Number of grants that pin each block."""
        self._ends: list[tuple[float, int, str]] = []
        """Heap of (expiry, grant number, lease id); some grants are released already."""
        self._grants = 0
        self._grant_number = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pinned_blocks(self) -> int:
        """Blocks pinned at least once."""
        return len(self._pins)

    def find(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    def pinnable(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks, from the first on, may be pinned. Blocks that are pinned already need no room."""
        free = self._limits.pinned_blocks_max - len(self._pins)
        if len(block_ids) <= free:
            return len(block_ids)
        for count, block_id in enumerate(block_ids):
            if block_id not in self._pins:
                if free <= 0:
                    return count
                free -= 1
        return len(block_ids)

    def pins_of(self, block_id: int) -> int:
        """Number of grants that pin the block."""
        return self._pins.get(block_id, 0)

    def is_full(self) -> bool:
        """Whether the maximum number of leases is reached."""
        return len(self._leases) >= self._limits.leases_max

    def grant(
        self,
        lease_id: str,
        reader_id: WorkerId,
        block_ids: list[int],
        until_s: float,
        groups: Sequence[list[int]] = (),
        boundary: int = 0,
    ) -> None:
        """Add a grant to a new or existing lease. The caller has asked ``pinnable``. ``groups`` are the blocks by KV
        cache group.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = Lease(lease_id, reader_id)
        if lease.groups or not lease.ever_granted:
            lease.groups.append(groups)
        if not lease.ever_granted:
            lease.ever_granted = True
            self.totals.granted += 1
        lease.boundary = boundary
        self._grant_number += 1
        lease.grants[self._grant_number] = block_ids
        self._grants += 1
        heapq.heappush(self._ends, (until_s, self._grant_number, lease_id))
        pins = self._pins
        for block_id in block_ids:
            pins[block_id] = pins.get(block_id, 0) + 1

    def follow(self, lease_id: str, reader_id: WorkerId, followed: FollowedPrompt) -> bool:
        """Remember the missing rest of a lease request. False: too many prompts are followed."""
        if len(self.followed) >= self._limits.followed_max:
            return False
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = Lease(lease_id, reader_id)
        lease.followed = followed
        self.followed[lease_id] = lease
        return True

    def stop_following(self, lease_id: str) -> None:
        """Grant nothing more; existing grants stay until their expiry."""
        lease = self.followed.pop(lease_id, None)
        if lease is None:
            return
        lease.followed = None
        if not lease.ever_granted:
            self.totals.refused += 1
        if not lease.grants:
            self._end(lease, expired=True)

    def release(self, lease_id: str, reader_id: WorkerId) -> list[int]:
        """End a lease and its followed prompt, if it belongs to this reader."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.reader_id not in (ANYONE, reader_id):
            return []
        self.followed.pop(lease_id, None)
        freed = self._unpin_all_of(lease)
        self._end(lease, expired=False)
        self._drop_stale_ends()
        return freed

    def unpin_all(self) -> list[int]:
        """Unpin all blocks. Followed leases stay in the table without blocks, because their readers wait for a last
        grant.
        """
        freed: list[int] = []
        for lease in list(self._leases.values()):
            if lease.followed is None:
                freed += self.release(lease.lease_id, lease.reader_id)
            else:
                freed += self._unpin_all_of(lease)
        self._drop_stale_ends()
        return freed

    def next_expiry(self) -> float:
        """Next instant at which a grant or followed prompt ends; infinity if there is none."""
        ends = self._ends
        while ends and not self._is_current(ends[0]):
            heapq.heappop(ends)
        first = ends[0][0] if ends else math.inf
        for lease in self.followed.values():
            if lease.followed is not None:
                first = min(first, lease.followed.until_s)
        return first

    def expire(self, now: float) -> list[int]:
        """End the grants whose expiry has passed."""
        freed: list[int] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, grant_number, lease_id = heapq.heappop(ends)
            lease = self._leases.get(lease_id)
            if lease is None or grant_number not in lease.grants:
                continue
            freed += self._unpin(lease, grant_number)
            if not lease.grants and lease.followed is None:
                self._end(lease, expired=True)
        return freed

    def _is_current(self, end: tuple[float, int, str]) -> bool:
        lease = self._leases.get(end[2])
        return lease is not None and end[1] in lease.grants

    def _unpin(self, lease: Lease, grant_number: int) -> list[int]:
        block_ids = lease.grants.pop(grant_number)
        lease.groups = []
        self._grants -= 1
        pins = self._pins
        for block_id in block_ids:
            left = pins[block_id] - 1
            if left:
                pins[block_id] = left
            else:
                del pins[block_id]
        return block_ids

    def _unpin_all_of(self, lease: Lease) -> list[int]:
        return [block_id for grant_number in list(lease.grants) for block_id in self._unpin(lease, grant_number)]

    def _end(self, lease: Lease, *, expired: bool) -> None:
        del self._leases[lease.lease_id]
        if not lease.ever_granted:
            return
        if expired:
            self.totals.expired += 1
        else:
            self.totals.released += 1

    def _drop_stale_ends(self) -> None:
        if len(self._ends) > 2 * self._grants + STALE_ENDS_MAX:
            self._ends = [end for end in self._ends if self._is_current(end)]
            heapq.heapify(self._ends)
