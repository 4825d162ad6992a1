"""Digests of leased blocks: the worker asks for them in a KV self-test, the worker role computes them.

The lease keeps the blocks as they are until then, and ends with the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from connector.holder.holder import Holder
from connector.messages import BlocksDigested, DigestBlocks, DigestLease, LeaseDigested
from shared.contracts.kv_exchange import KvDigest, KvGroupKind

DIGEST_S_MAX = 5.0
"""Time limit for the worker role, which needs milliseconds unless it is in a long step."""
DIGESTS_MAX = 16
"""Digests under way; further ones are refused."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    order: DigestLease
    groups: list[list[int]]
    until_s: float


class LeaseDigests:
    """All digests under way in one engine. Used on the scheduler's thread."""

    def __init__(self, holder: Holder, now: Callable[[], float]) -> None:
        self.ended: list[LeaseDigested] = []
        self.under_way: dict[int, _UnderWay] = {}
        self._holder = holder
        self._now = now
        self._numbers = count(1)

    def start(self, order: DigestLease) -> DigestBlocks | None:
        """What the worker role is to do; None if there is nothing to compute: then the result is in ``ended``."""
        groups = self._leased(order.lease_id)
        if not groups:
            self._end(order, failure="there is no such lease")
            return None
        if len(self.under_way) >= DIGESTS_MAX:
            self._end(order, failure="too many digests at a time: try again later")
            return None
        number = next(self._numbers)
        self.under_way[number] = _UnderWay(order, groups, self._now() + DIGEST_S_MAX)
        return DigestBlocks(number, groups)

    def on_time(self) -> None:
        """Give up what is overdue."""
        for number, one in list(self.under_way.items()):
            if self._now() >= one.until_s:
                del self.under_way[number]
                self._end(one.order, failure=f"not computed within {DIGEST_S_MAX:g} s")

    def on_digested(self, result: BlocksDigested) -> None:
        """The worker role has computed digests on all ranks."""
        one = self.under_way.pop(result.digest_number, None)
        if one is None:
            return
        if result.failure:
            self._end(one.order, failure=result.failure)
        elif self._leased(one.order.lease_id) != one.groups:
            self._end(one.order, failure="the lease ended before the digests were computed")
        else:
            self._end(one.order, digests=[_digest(result, number, len(of)) for number, of in enumerate(one.groups)])

    def _leased(self, lease_id: str) -> list[list[int]]:
        """The lease's blocks by group; none if it is unknown or has ended. Of a block that goes on after the boundary
        the holder and its reader have different bytes, unless it is a state, which ends there.
        """
        blocks, boundary = self._holder.leased(lease_id)
        groups = self._holder.groups.groups if blocks else ()
        return [
            list(of if group.kind is KvGroupKind.STATE or not boundary % group.block_size else of[:-1])
            for group, of in zip(groups, blocks, strict=True)
        ]

    def _end(self, order: DigestLease, *, digests: list[KvDigest] | None = None, failure: str = "") -> None:
        self._holder.release_own(order.lease_id)
        self.ended.append(LeaseDigested(digest_id=order.digest_id, digests=digests or [], failure=failure))


def _digest(result: BlocksDigested, group: int, blocks: int) -> KvDigest:
    return KvDigest(group=group, blocks=blocks, digest=result.digest(group), is_uniform=group not in result.uneven)
