"""Asks of this worker's engine that holders have not fully answered."""

from __future__ import annotations

import math

import msgspec

from shared.contracts.ids import Epoch, WorkerId, is_subject_token
from shared.contracts.kv_exchange import (
    FULL_HASH_BYTES,
    LEASE_BLOCKS_MAX,
    KvGrant,
    LeaseKv,
    NoGrant,
    ReleaseKv,
)

ASKS_MAX = 8192
"""Open at a time; beyond that the oldest ends as unreachable."""
BLOCK_ID_BYTES = 4


class OpenAsks:
    """Every LeaseKv that was sent, until its last grant, its release, or the report that it was not delivered."""

    def __init__(self) -> None:
        self._open: dict[str, LeaseKv] = {}

    @property
    def open(self) -> int:
        """Number of asks that may still be answered."""
        return len(self._open)

    def asked(self, lease: LeaseKv) -> list[KvGrant]:
        """It is sent. Returns grants for the engine that end older asks, if there are too many."""
        self._open[lease.ask_id] = msgspec.structs.replace(lease, hashes=b"")
        if len(self._open) <= ASKS_MAX:
            return []
        return [no_grant(self._open.pop(next(iter(self._open))), NoGrant.UNREACHABLE)]

    def released(self, release: ReleaseKv) -> None:
        """The engine has released these."""
        for ask_id in release.ask_ids:
            self._open.pop(ask_id, None)

    def answered(self, grant: KvGrant) -> KvGrant | ReleaseKv | None:
        """A grant arrived. Returns the grant for the engine, a release for the holder if the engine did not ask for it,
        or None. A grant of another epoch or a malformed one becomes a grant of nothing.
        """
        ask = self._open.get(grant.ask_id)
        if ask is None or ask.worker_id != grant.worker_id:
            return unclaimed(grant) if grant.lease_id and is_subject_token(grant.worker_id) else None
        if grant.epoch != ask.epoch or grant.reason is NoGrant.EPOCH:
            del self._open[grant.ask_id]
            return no_grant(ask, NoGrant.EPOCH)
        if not is_sound_grant(grant):
            del self._open[grant.ask_id]
            return no_grant(ask, NoGrant.UNREACHABLE)
        if grant.final:
            del self._open[grant.ask_id]
        return grant

    def unreachable(self, ask_id: str) -> KvGrant | None:
        """The ask was not delivered."""
        ask = self._open.pop(ask_id, None)
        return None if ask is None else no_grant(ask, NoGrant.UNREACHABLE)

    def all_unreachable(self) -> list[KvGrant]:
        """Grants may have been lost: all open asks end."""
        grants = [no_grant(ask, NoGrant.UNREACHABLE) for ask in self._open.values()]
        self._open.clear()
        return grants

    def gone(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """That epoch of a holder has ended. The engine learns of it by ``PeerGone``."""
        self._open = {
            ask_id: ask for ask_id, ask in self._open.items() if (ask.worker_id, ask.epoch) != (worker_id, epoch)
        }


def no_grant(ask: LeaseKv, reason: NoGrant) -> KvGrant:
    """The last grant of an ask, without blocks."""
    return KvGrant(reader_id=ask.reader_id, worker_id=ask.worker_id, epoch=ask.epoch, ask_id=ask.ask_id, reason=reason)


def unclaimed(grant: KvGrant) -> ReleaseKv:
    """Releases a grant that its reader does not wait for, or will never receive."""
    return ReleaseKv(worker_id=grant.worker_id, epoch=grant.epoch, reader_id=grant.reader_id, ask_ids=[grant.ask_id])


def is_sound_grant(grant: KvGrant) -> bool:
    """Whether its fields can be read and agree."""
    blocks, rest = divmod(len(grant.block_ids), BLOCK_ID_BYTES)
    return (
        rest == 0
        and 0 <= grant.first <= LEASE_BLOCKS_MAX
        and blocks <= LEASE_BLOCKS_MAX
        and (blocks == 0 or (bool(grant.lease_id) and len(grant.last_hash) == FULL_HASH_BYTES))
        and math.isfinite(grant.until_s)
        and math.isfinite(grant.clock_s)
    )


def is_sound_lease(lease: LeaseKv) -> bool:
    """Whether it can be read, and its reader can be addressed."""
    hashes, rest = divmod(len(lease.hashes), FULL_HASH_BYTES)
    return (
        rest == 0
        and 0 < hashes <= LEASE_BLOCKS_MAX
        and is_subject_token(lease.reader_id)
        and is_subject_token(lease.ask_id)
        and (not lease.leg_id or is_subject_token(lease.leg_id))
        and _is_duration(lease.hold_s)
        and _is_duration(lease.follow_s)
    )


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0.0
