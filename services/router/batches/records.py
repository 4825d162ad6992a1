"""The records of files and batches in their buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from services.router.batches.file_store import StoreFailed
from shared.bus.port import Bus, BusError, StoredValue, WrongRevision
from shared.contracts.batches import CANCELLING, StoredBatch, StoredFile, tenant_prefix
from shared.contracts.channels import BATCHES, FILES


class ClaimLost(Exception):
    """Another router runs the batch, or it is gone."""


class Records:
    """Reads and writes them. All methods raise StoreFailed."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

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
        """All batches of a tenant."""
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
