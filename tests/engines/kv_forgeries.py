"""Grants that no holder gave."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shared.contracts.channels import KV_GRANT, Channel, Delivery
from shared.contracts.kv_exchange import KvGrant, LeaseKv, pack_block_ids, unpack_full_hashes
from shared.contracts.message import Message


class Garbled(Message, frozen=True, kw_only=True):
    """No grant at all."""

    reader_id: str
    ask_id: str
    block_ids: int = 7


GARBLED = Channel(KV_GRANT.subject, Garbled, Delivery.COMMAND, KV_GRANT.senders, KV_GRANT.receivers)


def forged(ask: LeaseKv, **fields: object) -> KvGrant:
    """A grant of everything that was asked for, but for ``fields``."""
    hashes = unpack_full_hashes(ask.hashes)
    whole = KvGrant(
        reader_id=ask.reader_id,
        worker_id=ask.worker_id,
        epoch=ask.epoch,
        ask_id=ask.ask_id,
        lease_id="forged",
        block_ids=pack_block_ids(range(1, len(hashes) + 1)),
        last_hash=hashes[-1],
        until_s=time.monotonic() + 60.0,
        clock_s=time.monotonic(),
    )
    return msgspec.structs.replace(whole, **fields)


FORGERIES: dict[str, Callable[[LeaseKv], Message]] = {
    "another life": lambda ask: forged(ask, epoch=ask.epoch - 1),
    "another worker": lambda ask: forged(ask, worker_id="nobody"),
    "another ask": lambda ask: forged(ask, ask_id="asked-by-nobody"),
    "other blocks": lambda ask: forged(ask, last_hash=bytes(32)),
    "blocks that are none": lambda ask: forged(ask, block_ids=pack_block_ids([2**31] * (len(ask.hashes) // 32))),
    "too many blocks": lambda ask: forged(ask, block_ids=pack_block_ids(range(1, 40))),
    "not the first ones": lambda ask: forged(ask, first=3),
    "half a number": lambda ask: forged(ask, block_ids=b"abc"),
    "garbage": lambda ask: Garbled(reader_id=ask.reader_id, ask_id=ask.ask_id),
}
