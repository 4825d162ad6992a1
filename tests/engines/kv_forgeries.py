"""Forged grants, which no holder sent."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec

from connector.groups import GroupPlan
from shared.contracts.channels import KV_GRANT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    GroupBlocks,
    KvGrant,
    KvGroupKind,
    LeaseKv,
    pack_block_ids,
    unpack_block_ids,
    unpack_full_hashes,
)
from shared.contracts.message import Message


class Garbled(Message, frozen=True, kw_only=True):
    """A message on the grant subject that does not decode as a grant."""

    reader_id: str
    worker_id: str
    ask_id: str
    groups: int = 7


HASHES = 64
"""Of a sample prompt."""
GARBLED = dataclasses.replace(KV_GRANT, message=Garbled)


Forge = Callable[[KvGrant, GroupPlan], Message]


def right(request: LeaseKv, plan: GroupPlan) -> KvGrant:
    """A grant of all that the request asks for, which its reader would take: the holder's blocks from 1 on."""
    hashes = unpack_full_hashes(request.hashes)
    boundary = (request.first + len(hashes)) * plan.unit
    needed = [plan.needed(number, request.have, boundary) for number in range(len(plan.groups))]
    return KvGrant(
        reader_id=request.reader_id,
        worker_id=request.worker_id,
        epoch=request.epoch,
        ask_id=request.ask_id,
        lease_id="forged",
        groups=[blocks(run.start, len(run)) for run in needed],
        boundary=boundary,
        last_hash=hashes[-1],
        until_s=time.monotonic() + 60.0,
        clock_s=time.monotonic(),
    )


def blocks(first: int, count: int) -> GroupBlocks:
    return GroupBlocks(first=first, block_ids=pack_block_ids(range(1, count + 1)))


def fields(**changed: object) -> Forge:
    """Other fields of the grant."""
    return lambda grant, _plan: msgspec.structs.replace(grant, **changed)


def each(change: Callable[[int, int], GroupBlocks], *kinds: KvGroupKind) -> Forge:
    """Other blocks in each group of these kinds, or of any: from the index of the first one and their number."""

    def forge(grant: KvGrant, plan: GroupPlan) -> KvGrant:
        groups = [
            change(one.first, len(unpack_block_ids(one.block_ids))) if group.kind in (kinds or KvGroupKind) else one
            for group, one in zip(plan.groups, grant.groups, strict=True)
        ]
        return msgspec.structs.replace(grant, groups=groups)

    return forge


FORGERIES: dict[str, Forge] = {
    "another epoch": lambda grant, _plan: msgspec.structs.replace(grant, epoch=grant.epoch - 1),
    "another worker": fields(worker_id="unknown-worker"),
    "another request": fields(ask_id="unknown-request"),
    "another prompt": fields(last_hash=bytes(32)),
    "block ids out of range": each(
        lambda first, count: GroupBlocks(first=first, block_ids=pack_block_ids([2**31] * count))
    ),
    "too many blocks": each(lambda first, count: blocks(first, count + 1)),
    "not from the first block on": each(lambda first, count: blocks(first + 3, count)),
    "truncated block ids": each(lambda first, _count: GroupBlocks(first=first, block_ids=b"abc")),
    "twice the groups": lambda grant, _plan: msgspec.structs.replace(grant, groups=2 * grant.groups),
    "a group less": lambda grant, _plan: msgspec.structs.replace(grant, groups=grant.groups[1:]),
    "groups in another order": lambda grant, _plan: msgspec.structs.replace(grant, groups=grant.groups[::-1]),
    "windows a block short": each(lambda first, count: blocks(first + 1, count - 1), KvGroupKind.WINDOW),
    "states of an earlier boundary": each(lambda first, count: blocks(first - 1, count), KvGroupKind.STATE),
    "full attention alone": each(lambda first, _count: blocks(first, 0), KvGroupKind.WINDOW, KvGroupKind.STATE),
    "garbage": lambda grant, _plan: Garbled(reader_id=grant.reader_id, worker_id=grant.worker_id, ask_id=grant.ask_id),
}


def forgeries(plan: GroupPlan) -> dict[str, Forge]:
    """Those that change a grant of an engine with these groups: some are of several groups, windows or states."""
    request = LeaseKv(
        worker_id=WorkerId("p"),
        epoch=Epoch(1),
        reader_id=WorkerId("d"),
        ask_id="sample",
        hashes=bytes(32 * HASHES),
        hold_s=1.0,
    )
    grant = right(request, plan)
    return {name: forge for name, forge in FORGERIES.items() if forge(grant, plan) != grant}
