"""The bytes of files in their bucket: segments, part by part."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

from shared.bus.port import Bus, BusError, KeyValueStore
from shared.contracts.batches import PART_BYTES, FilePart, Segment, part_key
from shared.contracts.channels import FILE_PARTS

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
        """What follows them."""
        self._stored_bytes = 0
        """Of the rest."""

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
        try:
            self._store = self._store or await self._bus.key_value_store(FILE_PARTS)
            await self._store.put(FilePart(key=part_key(self._token, self._full), data=data))
        except BusError as error:
            raise StoreFailed(str(error)) from error


async def read(bus: Bus, segments: Sequence[Segment], offset: int = 0) -> AsyncGenerator[bytes, None]:
    """The bytes from ``offset`` on. Raises StoreFailed."""
    try:
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
    except BusError as error:
        raise StoreFailed(str(error)) from error


async def remove(bus: Bus, segments: Sequence[Segment]) -> None:
    """Remove all parts. Raises StoreFailed."""
    try:
        store = await bus.key_value_store(FILE_PARTS)
        for segment in segments:
            for number in range(-(-segment.size // PART_BYTES)):
                await store.delete(part_key(segment.token, number))
    except BusError as error:
        raise StoreFailed(str(error)) from error
