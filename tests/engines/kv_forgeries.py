"""Forged grants, which no holder sent."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec

from shared.contracts.channels import KV_GRANT
from shared.contracts.kv_exchange import GroupBlocks, KvGrant, LeaseKv, unpack_full_hashes
from shared.contracts.message import Message
from tests.support.kv_messages import one_group


class Garbled(Message, frozen=True, kw_only=True):
    """A message on the grant subject that does not decode as a grant."""

    reader_id: str
    worker_id: str
    ask_id: str
    groups: int = 7


GARBLED = dataclasses.replace(KV_GRANT, message=Garbled)


def forged(request: LeaseKv, **fields: object) -> KvGrant:
    """A grant of all requested blocks, with ``fields`` replaced."""
    hashes = unpack_full_hashes(request.hashes)
    grant = KvGrant(
        reader_id=request.reader_id,
        worker_id=request.worker_id,
        epoch=request.epoch,
        ask_id=request.ask_id,
        lease_id="forged",
        groups=one_group(range(1, len(hashes) + 1), request.first),
        last_hash=hashes[-1],
        until_s=time.monotonic() + 60.0,
        clock_s=time.monotonic(),
    )
    return msgspec.structs.replace(grant, **fields)


FORGERIES: dict[str, Callable[[LeaseKv], Message]] = {
    "another epoch": lambda request: forged(request, epoch=request.epoch - 1),
    "another worker": lambda request: forged(request, worker_id="unknown-worker"),
    "another request": lambda request: forged(request, ask_id="unknown-request"),
    "another prompt": lambda request: forged(request, last_hash=bytes(32)),
    "block ids out of range": lambda request: forged(
        request, groups=one_group([2**31] * (len(request.hashes) // 32), request.first)
    ),
    "too many blocks": lambda request: forged(
        request, groups=one_group(range(1, len(unpack_full_hashes(request.hashes)) + 2), request.first)
    ),
    "not from the first block on": lambda request: forged(
        request, groups=one_group(range(1, len(unpack_full_hashes(request.hashes)) + 1), request.first + 3)
    ),
    "truncated block ids": lambda request: forged(request, groups=[GroupBlocks(first=request.first, block_ids=b"abc")]),
    "blocks of two groups": lambda request: forged(request, groups=2 * one_group([1], request.first)),
    "garbage": lambda request: Garbled(reader_id=request.reader_id, worker_id=request.worker_id, ask_id=request.ask_id),
}
