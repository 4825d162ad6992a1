"""What JetStream keeps of files and batches: their records, and the bytes of files in segments, part by part."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import msgspec

from shared.bus.port import Bus, BusError, KeyValueStore, StoredValue, WrongRevision
from shared.contracts.batches import (
    CANCELLING,
    PART_BYTES,
    FilePart,
    Segment,
    StoredBatch,
    StoredFile,
    part_key,
    tenant_prefix,
)
from shared.contracts.channels import BATCHES, FILE_PARTS, FILES

TOKEN_BYTES = 16


class StoreFailed(Exception):
    """The bucket cannot be read or written. ``passes``: it may be possible later."""

    def __init__(self, message: str, *, passes: bool = True) -> None:
        super().__init__(message)
        self.passes = passes


class SegmentWriter:
    """Appends to a new segment."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._store: KeyValueStore[FilePart] | None = None
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._full = 0
        """Parts that are stored and full."""
        self._rest = b""
        """Bytes after the full parts."""
        self._stored_bytes = 0
        """Bytes of the rest that are stored."""

    @property
    def segment(self) -> Segment:
        """All bytes so far."""
        return Segment(token=self._token, size=self._full * PART_BYTES + len(self._rest))

    def add(self, data: bytes) -> None:
        """Append bytes, which ``store`` will store."""
        self._rest += data

    async def store(self, *, whole: bool = True) -> None:
        """Store what was added; not ``whole``: only full parts. The last part is written again when bytes follow: those
        that it has never change. May be repeated after StoreFailed.
        """
        while len(self._rest) >= PART_BYTES:
            await self._put(self._rest[:PART_BYTES])
            self._full, self._rest, self._stored_bytes = self._full + 1, self._rest[PART_BYTES:], 0
        if whole and self._stored_bytes < len(self._rest):
            await self._put(self._rest)
            self._stored_bytes = len(self._rest)

    async def _put(self, data: bytes) -> None:
        async with _errors():
            self._store = self._store or await self._bus.key_value_store(FILE_PARTS)
            await self._store.put(FilePart(key=part_key(self._token, self._full), data=data))


async def read(bus: Bus, segments: Sequence[Segment], offset: int = 0) -> AsyncGenerator[bytes, None]:
    """The bytes from ``offset`` on. Raises StoreFailed."""
    async with _errors():
        store = await bus.key_value_store(FILE_PARTS)
        for segment in segments:
            at, offset = min(offset, segment.size), max(0, offset - segment.size)
            while at < segment.size:
                number, begin = divmod(at, PART_BYTES)
                stored = await store.get(part_key(segment.token, number))
                part = stored.value.data if stored is not None and stored.value is not None else b""
                piece = part[begin : begin + segment.size - at]
                if not piece:
                    raise StoreFailed("a part of the file is lost, or has expired", passes=False)
                at += len(piece)
                yield piece


async def remove(bus: Bus, segments: Sequence[Segment]) -> None:
    """Remove all parts, the last ones first: see ``parts_of``. Raises StoreFailed."""
    async with _errors():
        store = await bus.key_value_store(FILE_PARTS)
        for segment in segments:
            for number in reversed(range(-(-segment.size // PART_BYTES))):
                await store.delete(part_key(segment.token, number))


async def parts_of(bus: Bus, token: str) -> int:
    """How many parts a segment of unknown size has: they were written in order. Raises StoreFailed."""
    async with _errors():
        store = await bus.key_value_store(FILE_PARTS)

        async def is_there(number: int) -> bool:
            return await store.get(part_key(token, number)) is not None

        beyond = 1
        while await is_there(beyond - 1):
            beyond *= 2
        least, most = beyond // 2, beyond - 1
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if await is_there(middle - 1) else (least, middle - 1)
        return least


class ClaimLost(Exception):
    """Another router runs the batch, or it is gone."""


class Records:
    """Reads and writes the records of files and batches. All methods raise StoreFailed."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._counting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def counting(self, tenant: str) -> asyncio.Lock:
        """Held from counting a tenant's records until one more is written: requests at once would all count the same.
        Other routers do not wait for it, so that a tenant may exceed a limit by one record for each of them.
        """
        return self._counting.setdefault(tenant, asyncio.Lock())

    async def file(self, key: str) -> StoredFile | None:
        """A file; None: there is none."""
        async with _errors():
            stored = await (await self.bus.key_value_store(FILES)).get(key)
        return stored.value if stored is not None else None

    async def put_file(self, file: StoredFile) -> None:
        """Store or replace it."""
        async with _errors():
            await (await self.bus.key_value_store(FILES)).put(file)

    async def delete_file(self, key: str) -> None:
        """Remove it; its bytes stay."""
        async with _errors():
            await (await self.bus.key_value_store(FILES)).delete(key)

    async def files(self, tenant: str | None = None) -> list[StoredFile]:
        """All files of a tenant; None: of all tenants."""
        async with _errors():
            found = await (await self.bus.key_value_store(FILES)).all((_prefix(tenant),))
        return [one.value for one in found if one.value is not None]

    async def batches(self, tenant: str) -> list[StoredBatch]:
        async with _errors():
            found = await (await self.bus.key_value_store(BATCHES)).all((_prefix(tenant),))
        return [one.value for one in found if one.value is not None]

    async def batch(self, key: str) -> StoredValue[StoredBatch] | None:
        """A batch with its revision; None: there is none."""
        async with _errors():
            stored = await (await self.bus.key_value_store(BATCHES)).get(key)
        return stored if stored is not None and stored.value is not None else None

    async def create_batch(self, batch: StoredBatch) -> None:
        """Store a new one."""
        async with _errors():
            await (await self.bus.key_value_store(BATCHES)).create(batch)

    async def delete_batch(self, key: str) -> None:
        """Forget it."""
        async with _errors():
            await (await self.bus.key_value_store(BATCHES)).delete(key)

    async def update_batch(self, batch: StoredBatch, revision: int) -> int:
        """Replace that revision; returns the new one. Raises WrongRevision."""
        async with _errors():
            return await (await self.bus.key_value_store(BATCHES)).update(batch, revision)

    async def commit(self, batch: StoredBatch, revision: int) -> tuple[StoredBatch, int]:
        """Replace what its runner wrote last, but not a client's cancellation. It is not known whether a write that
        failed was made, so that the runner's earlier revisions count too. Raises ClaimLost.
        """
        try:
            return batch, await self.update_batch(batch, revision)
        except WrongRevision:
            pass
        stored = await self.batch(batch.key)
        if stored is None or stored.value is None or stored.value.run != batch.run:
            raise ClaimLost
        if stored.value.status == CANCELLING and not batch.has_ended:
            batch = msgspec.structs.replace(batch, status=CANCELLING, times={**stored.value.times, **batch.times})
        try:
            return batch, await self.update_batch(batch, stored.revision)
        except WrongRevision as error:
            raise StoreFailed(str(error)) from error


def _prefix(tenant: str | None) -> str:
    return "" if tenant is None else tenant_prefix(tenant)


@asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    try:
        yield
    except WrongRevision:
        raise
    except BusError as error:
        raise StoreFailed(str(error)) from error
