"""Clients' files: taken piece by piece, listed, read and deleted by their tenant only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from services.router.batches.store import Records, SegmentWriter, StoreFailed, parts_of, read, remove
from shared.contracts.batches import (
    FILE_ID,
    FILE_S_MAX,
    PART_BYTES,
    UPLOAD,
    Segment,
    StoredFile,
    record_key,
    upload_key,
)
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

FILE_BYTES_MAX = 200 * 1024 * 1024
"""As OpenAI's, for the input of a batch."""
FILES_MAX = 1000
"""Files of one tenant."""
FILE_S_MIN = 3600
PURPOSE = "batch"
FILENAME_CHARS_MAX = 255
RANDOM_BYTES = 10
"""Random bytes in an id."""
SWEEP_S = 600.0
UPLOAD_KEPT_S = 3600
"""Longer than any upload takes: then its router was lost, and its parts can go."""


class FileRefused(Exception):
    """The file is not taken, or not deleted; the message is the client's."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def new_id(kind: str, now_ms: int) -> str:
    """An id that cannot be guessed. Ids of one kind sort by their time; ``created_at`` has whole seconds only."""
    return f"{kind}{now_ms:012x}{secrets.token_hex(RANDOM_BYTES)}"


class Files:
    """All methods raise StoreFailed."""

    def __init__(self, records: Records, clock: Clock, bytes_max: int) -> None:
        """``bytes_max``: of one tenant."""
        self._records = records
        self._clock = clock
        self._bytes_max = bytes_max
        self._arriving: dict[str, set[IncomingFile]] = {}
        """Uploads that this router receives, by tenant."""

    async def incoming(self, tenant: str) -> IncomingFile:
        """A file that arrives now. Raises FileRefused if there is no room for any."""
        files = await self.of_tenant(tenant)
        if len(files) >= FILES_MAX:
            raise too_many_files()
        beside = self._arriving.setdefault(tenant, set())
        incoming = IncomingFile(self._records, self._clock, self._bytes_left(files), beside)
        beside.add(incoming)
        return incoming

    async def keep(
        self, tenant: str, incoming: IncomingFile, *, filename: str, purpose: str, expires_s: int
    ) -> StoredFile:
        """Keep a file that has arrived. Raises FileRefused when others that arrived meanwhile have left no room."""
        await incoming.close()
        now, file_id = self._now(), new_id("file-", self._clock.wall_ms())
        file = StoredFile(
            key=record_key(tenant, file_id),
            id=file_id,
            filename=filename[:FILENAME_CHARS_MAX],
            purpose=purpose,
            created_at=now,
            expires_at=now + min(expires_s or FILE_S_MAX, FILE_S_MAX),
            segments=[incoming.segment],
        )
        async with self._records.counting(tenant):
            files = await self.of_tenant(tenant)
            if len(files) >= FILES_MAX:
                raise too_many_files()
            if incoming.segment.size > (bytes_left := self._bytes_left(files)):
                raise storage_full(bytes_left)
            await self._records.put_file(file)
            self.arrived(tenant, incoming)
        await incoming.forget()
        return file

    def arrived(self, tenant: str, incoming: IncomingFile) -> None:
        """The file is kept, or its upload has failed: its bytes do not count as arriving any more."""
        arriving = self._arriving.get(tenant, set())
        arriving.discard(incoming)
        if not arriving:
            self._arriving.pop(tenant, None)

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """The tenant's file; None: it has none of this id, or it has expired."""
        if not FILE_ID.fullmatch(file_id):
            return None
        file = await self._records.file(record_key(tenant, file_id))
        return file if file is not None and file.expires_at > self._now() else None

    async def of_tenant(self, tenant: str) -> list[StoredFile]:
        """The tenant's files, the newest first."""
        now = self._now()
        files = [file for file in await self._records.files(tenant) if file.expires_at > now]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Remove it; False: there is none. Raises FileRefused for the input of a batch that has not ended."""
        file = await self.find(tenant, file_id)
        if file is None:
            return False
        for batch in await self._records.batches(tenant):
            if batch.input_file_id == file_id and not batch.has_ended:
                message = f"{batch.id} reads this file. Cancel the batch, or delete the file when it has ended."
                raise FileRefused(409, message, "file_in_use", "file_id")
        await self._remove(file)
        return True

    def content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        return read(self._records.bus, file.segments)

    async def sweep(self) -> None:
        """Remove expired files, and what lost routers have left of uploads, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                files = await self._records.files()
                kept = {one.token for file in files if file.purpose != UPLOAD for one in file.segments}
                for file in files:
                    if file.expires_at <= self._now():
                        await self._remove(await self._whole(file, kept) if file.purpose == UPLOAD else file)
            except StoreFailed as error:
                log.info("expired files cannot be removed, trying again: %s", error)

    async def _whole(self, upload: StoredFile, kept: set[str]) -> StoredFile:
        """The record of an upload, with all parts that no file has."""
        tokens = [one.token for one in upload.segments if one.token not in kept]
        parts = [Segment(token=one, size=await parts_of(self._records.bus, one) * PART_BYTES) for one in tokens]
        return msgspec.structs.replace(upload, segments=parts)

    def _bytes_left(self, files: list[StoredFile]) -> int:
        return max(0, self._bytes_max - sum(one.size for one in files))

    async def _remove(self, file: StoredFile) -> None:
        await remove(self._records.bus, file.segments)
        await self._records.delete_file(file.key)

    def _now(self) -> int:
        return self._clock.wall_ms() // 1000


class IncomingFile:
    """The bytes of a file while they arrive."""

    def __init__(self, records: Records, clock: Clock, bytes_left: int, beside: set[IncomingFile]) -> None:
        """``bytes_left``: for this file and those that arrive ``beside`` it, of the same tenant."""
        self._records = records
        self._clock = clock
        self._is_recorded = False
        self._bytes_left = bytes_left
        self._beside = beside
        self._writer = SegmentWriter(records.bus)

    @property
    def segment(self) -> Segment:
        """All bytes so far."""
        return self._writer.segment

    async def add(self, data: bytes) -> None:
        """Raises FileRefused when there are too many."""
        size = self.segment.size + len(data)
        if size > FILE_BYTES_MAX:
            raise FileRefused(413, f"A file may have at most {FILE_BYTES_MAX} bytes.", "file_too_large", "file")
        bytes_left = self._bytes_left - sum(one.segment.size for one in self._beside if one is not self)
        if size > bytes_left:
            raise storage_full(max(0, bytes_left))
        self._writer.add(data)
        if self.segment.size >= PART_BYTES and not self._is_recorded:
            await self._record()
        await self._writer.store(whole=False)

    async def close(self) -> None:
        """Store the rest."""
        await self._writer.store()

    async def forget(self) -> None:
        """The upload has ended: its parts belong to a file, or are gone."""
        if self._is_recorded:
            with contextlib.suppress(StoreFailed):  # Then the record expires.
                await self._records.delete_file(upload_key(self.segment.token))

    async def _record(self) -> None:
        """Write the record by which another router finds the parts if this one is lost. A file of less than a part has
        none.
        """
        token, now = self.segment.token, self._clock.wall_ms() // 1000
        upload = StoredFile(
            key=upload_key(token),
            id="",
            filename="",
            purpose=UPLOAD,
            created_at=now,
            expires_at=now + UPLOAD_KEPT_S,
            segments=[Segment(token=token, size=0)],
        )
        await self._records.put_file(upload)
        self._is_recorded = True

    async def discard(self) -> None:
        await remove(self._records.bus, [self.segment])
        await self.forget()


def too_many_files() -> FileRefused:
    """403."""
    return FileRefused(403, f"A tenant may have {FILES_MAX} files. Delete some first.", "too_many_files")


def storage_full(bytes_left: int) -> FileRefused:
    """413."""
    message = f"The tenant's files may have {bytes_left} bytes more. Delete some first."
    return FileRefused(413, message, "storage_full", "file")


def file_object(file: StoredFile) -> dict[str, Any]:
    """As OpenAI's."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
