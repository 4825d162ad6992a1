"""The bucket of kept responses: an entry is compressed, and stored in parts that are small enough for NATS. Each tenant
has a share of the room, of which its oldest responses go first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from services.router.responses.history import StoredResponse
from shared.bus.port import Bus, BusError, KeyValueStore
from shared.contracts.channels import RESPONSES
from shared.contracts.routers import PART_BYTES, PARTS_MAX, ResponsePart, part_key

log = logging.getLogger("baton.router")

STORE_S_MAX = 3.0
"""Time limit for one entry to be read or written. The last event of a response waits for it."""
PARTS_AT_ONCE = 8
LEVEL = 1
ON_LOOP_BYTES_MAX = 128 * 1024
"""What is larger is read, compressed and unpacked in a thread."""
VERSION_BYTES = 8
TENANT_RESPONSES_MAX = 50_000
"""Responses of one tenant that a router stores. It remembers 150 bytes of each."""

R = TypeVar("R")

_entry = msgspec.json.Decoder(StoredResponse)


class NotKept(Exception):
    """The entry cannot be read or written; the message says why. ``passes``: it may be possible later."""

    def __init__(self, message: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


class TenantShares:
    """What this router has stored for each tenant, the oldest first."""

    def __init__(self, bytes_max: int) -> None:
        """``bytes_max``: of a tenant, compressed; 0: unbounded, as the only tenant of a system without keys is."""
        self._bytes_max = bytes_max
        self._sizes: dict[str, dict[str, int]] = {}
        self._totals: dict[str, int] = {}

    def stored(self, tenant: str, key: str, size: int) -> list[str]:
        """An entry of this size is stored: the keys of those that must go."""
        if not self._bytes_max or not tenant:
            return []
        self.removed(tenant, key)
        sizes = self._sizes.setdefault(tenant, {})
        sizes[key] = size
        self._totals[tenant] = self._totals.get(tenant, 0) + size
        oldest: list[str] = []
        while len(sizes) > 1 and (self._totals[tenant] > self._bytes_max or len(sizes) > TENANT_RESPONSES_MAX):
            oldest.append(next(iter(sizes)))
            self.removed(tenant, oldest[-1])
        return oldest

    def removed(self, tenant: str, key: str) -> None:
        """The entry is gone."""
        size = self._sizes.get(tenant, {}).pop(key, None)
        if size is not None:
            self._totals[tenant] -= size


class ResponseStore:
    """Reads and writes entries. All methods raise NotKept."""

    def __init__(self, bus: Bus, bytes_max: int, tenant_bytes_max: int = 0) -> None:
        """``bytes_max``: of an entry, as JSON; ``tenant_bytes_max``: see ``TenantShares``."""
        self._bus = bus
        self._bytes_max = bytes_max
        self._shares = TenantShares(tenant_bytes_max)
        self._parts = asyncio.Semaphore(PARTS_AT_ONCE)

    async def put(self, tenant: str, key: str, entry: StoredResponse) -> None:
        """Write the entry, over an earlier version. Its first part comes last: where it is, all others are."""
        data = msgspec.json.encode(entry)
        if len(data) > self._bytes_max:
            raise NotKept(f"it has {len(data)} bytes with its history; at most {self._bytes_max} are kept")
        packed = await on_loop_or_thread(len(data), zlib.compress, data, LEVEL)
        pieces = [packed[begin : begin + PART_BYTES] for begin in range(0, len(packed), PART_BYTES)]
        if len(pieces) > PARTS_MAX:
            raise NotKept(f"it has {len(packed)} bytes even when compressed")
        version, count = secrets.token_hex(VERSION_BYTES), len(pieces)
        first, *others = [
            ResponsePart(key=part_key(key, number), version=version, parts=count, data=piece)
            for number, piece in enumerate(pieces)
        ]
        async with _in_time():
            store = await self._bus.key_value_store(RESPONSES)
            await asyncio.gather(*(self._put(store, part) for part in others))
            await store.put(first)
        for old in self._shares.stored(tenant, key, len(packed)):
            try:
                await self._remove(old)
            except NotKept as error:
                log.info("a tenant's oldest response cannot be removed, it will expire: %s", error)

    async def get(self, key: str) -> StoredResponse | None:
        """None: nothing is stored under the key, or not all of it any more."""
        async with _in_time():
            store = await self._bus.key_value_store(RESPONSES)
            first = await self._get(store, key)
            if first is None or not 0 < first.parts <= PARTS_MAX:
                return None
            keys = [part_key(key, number) for number in range(1, first.parts)]
            parts = [first, *await asyncio.gather(*(self._get(store, one) for one in keys))]
        data = [part.data for part in parts if part is not None and part.version == first.version]
        if len(data) < first.parts:
            return None
        try:
            return await on_loop_or_thread(sum(map(len, data)), self._unpacked, b"".join(data))
        except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotKept(f"what is stored cannot be read: {error}") from error

    async def delete(self, tenant: str, key: str) -> bool:
        """Remove the entry. Returns whether there was one."""
        self._shares.removed(tenant, key)
        return await self._remove(key)

    async def _remove(self, key: str) -> bool:
        async with _in_time():
            store = await self._bus.key_value_store(RESPONSES)
            first = await self._get(store, key)
            if first is None:
                return False
            count = min(first.parts, PARTS_MAX)
            await store.delete(key)
            await asyncio.gather(*(self._delete(store, part_key(key, number)) for number in range(1, count)))
        return True

    async def _put(self, store: KeyValueStore[ResponsePart], part: ResponsePart) -> None:
        async with self._parts:
            await store.put(part)

    async def _get(self, store: KeyValueStore[ResponsePart], key: str) -> ResponsePart | None:
        async with self._parts:
            stored = await store.get(key)
        return stored.value if stored is not None else None

    async def _delete(self, store: KeyValueStore[ResponsePart], key: str) -> None:
        async with self._parts:
            await store.delete(key)

    def _unpacked(self, packed: bytes) -> StoredResponse:
        """Bounded: what routers of other settings stored may be larger than this one holds."""
        data = zlib.decompressobj().decompress(packed, max(self._bytes_max, 1))
        return _entry.decode(data)


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Bounds the time of what runs within, and turns errors of the bus into NotKept."""
    try:
        async with asyncio.timeout(STORE_S_MAX):
            yield
    except TimeoutError:
        raise NotKept(f"NATS did not reply within {STORE_S_MAX:g} s", passes=True) from None
    except BusError as error:
        raise NotKept(str(error), passes=True) from error


async def on_loop_or_thread(size: int, work: Callable[..., R], *arguments: Any) -> R:
    """The result of ``work``, which runs in a thread if its ``size`` in bytes would hold up the event loop."""
    return work(*arguments) if size <= ON_LOOP_BYTES_MAX else await asyncio.to_thread(work, *arguments)
