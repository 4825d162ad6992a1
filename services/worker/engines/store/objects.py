"""A store's blocks in an object store that speaks S3: the ``BlockFile`` of the tier below files.

Blocks of consecutive places are one object of up to ``OBJECT_BYTES``, since object stores charge and answer by request.
An object is written once as a whole and read as a whole, through a buffer of its own: what comes late, or damaged, is
never written into the store's memory. Every call ends within ``CALL_S_MAX``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

from obstore import delete, get, put
from obstore import list as list_objects
from obstore.exceptions import BaseError
from obstore.store import S3Store

from connector.transfer.agent import TransferFailed
from services.worker.engines.store.files import BlocksGone, content_at
from services.worker.engines.store.records import blocks_in_object

log = logging.getLogger("baton.worker")

CONNECT_S_MAX, CALL_S_MAX = 1.0, 5.0
RETRIES = 1
KEY = re.compile(r"[0-9a-f]{8}")
FAILURES = (BaseError, OSError)
"""obstore raises ``FileNotFoundError`` for a missing object."""


class ObjectFile:
    """Offsets are those of a file; ``object_bytes`` of them are one object, whose key is its number."""

    def __init__(self, url: str, folder: str, block_bytes: int) -> None:
        """``url``: ``http(s)://host/bucket``, or a folder in it; ``folder`` below is this store's. Raises ValueError.

        Credentials come from where AWS clients find them: ``AWS_ACCESS_KEY_ID`` and its like, or the machine's role.
        """
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("leave credentials and options out of the URL; set AWS_ACCESS_KEY_ID and the like")
        bucket, _, above = parts.path.strip("/").partition("/")
        if parts.scheme not in {"http", "https"} or not parts.hostname or not bucket:
            raise ValueError(f"{url!r} is no http(s)://host/bucket")
        self.description = f"objects at {parts.hostname}"
        self._object_bytes = blocks_in_object(block_bytes) * block_bytes
        self._store = S3Store(
            bucket,
            prefix="/".join(filter(None, (above, folder))),
            endpoint=f"{parts.scheme}://{parts.netloc}",
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": parts.scheme == "http",
                "connect_timeout": timedelta(seconds=CONNECT_S_MAX),
                "timeout": timedelta(seconds=CALL_S_MAX / (RETRIES + 1)),
            },
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=CALL_S_MAX / (RETRIES + 1))},
        )

    def write(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        """Write whole objects: blocks at the beginning of each, without gaps. Raises TransferFailed."""
        for number, blocks in self._objects(addresses, offsets):
            if [within for _address, within in blocks] != list(range(0, len(blocks) * length, length)):
                raise TransferFailed(f"object {number} would have gaps")
            content = b"".join(bytes(content_at(address, length)) for address, _within in blocks)
            try:
                put(self._store, key_of(number), content, use_multipart=False)
            except FAILURES as error:
                raise TransferFailed(f"writing object {number}: {first_line(error)}") from error

    def read(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        """Raises TransferFailed, BlocksGone."""
        for number, blocks in self._objects(addresses, offsets):
            try:
                found = get(self._store, key_of(number))
                if found.meta["size"] > self._object_bytes:
                    raise BlocksGone(f"object {number} is larger than any of this store's")
                content = memoryview(found.bytes())
            except FileNotFoundError as error:
                raise BlocksGone(f"object {number} is not found") from error
            except FAILURES as error:
                raise TransferFailed(f"reading object {number}: {first_line(error)}") from error
            if len(content) < blocks[-1][1] + length:
                raise BlocksGone(f"object {number} ends before the block does")
            for address, within in blocks:
                content_at(address, length)[:] = content[within : within + length]

    def keep_only(self, numbers: set[int]) -> None:
        """Remove all other objects: of blocks of another shape, or from before the index was lost or cut."""
        try:
            for page in list_objects(self._store):
                others = [one["path"] for one in page if number_of(one["path"]) not in numbers]
                if others:
                    delete(self._store, others)
        except FAILURES as error:
            log.warning("objects that are not used any more were not removed: %s", first_line(error))

    def close(self) -> None:
        """Do nothing: connections end with the process."""

    def _objects(self, addresses: Sequence[int], offsets: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The blocks of each object by address and place within it, in order."""
        rows = sorted(
            (*divmod(offset, self._object_bytes), address) for address, offset in zip(addresses, offsets, strict=True)
        )
        for number, blocks in groupby(rows, key=lambda row: row[0]):
            yield number, [(address, within) for _number, within, address in blocks]


def key_of(number: int) -> str:
    return f"{number:08x}"


def number_of(key: str) -> int:
    """-1 if it is no object's key."""
    return int(key, 16) if KEY.fullmatch(key) else -1


def first_line(error: Any) -> str:
    """Without what obstore adds for its developers."""
    return str(error).partition("\n")[0]
