"""KeyValueStore values inside one process, with the same expiry, revisions and watches as JetStream's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from shared.bus.port import BusCounts, BusDown, StoredValue, WrongRevision
from shared.bus.receiver import count_bad, read_entry
from shared.bus.wire import BadMessage, pack
from shared.contracts.channels import Channel

M = TypeVar("M", bound=msgspec.Struct)


class Owner(Protocol):
    """The bus that a watch belongs to."""

    connected: bool
    counts: BusCounts


@dataclass(slots=True)
class _Stored:
    payload: bytes
    revision: int
    expiry: asyncio.TimerHandle | None


@dataclass(slots=True, eq=False)
class _Watch:
    owner: Owner
    changes: asyncio.Queue[tuple[str, bytes | None, int] | None] = field(default_factory=asyncio.Queue)
    """None: tell everything again."""


class MemoryBucket:
    """The values of one KEY_VALUE channel, shared by all buses of a hub."""

    def __init__(self) -> None:
        self.ttl_s: float | None = None
        self.values: dict[str, _Stored] = {}
        self.watches: list[_Watch] = []
        self._revision = 0

    def store(self, key: str, payload: bytes) -> int:
        self._revision += 1
        self._forget(key)
        expiry = None
        if self.ttl_s is not None:
            expiry = asyncio.get_running_loop().call_later(self.ttl_s, self.remove, key)
        self.values[key] = _Stored(payload, self._revision, expiry)
        self._tell(key, payload)
        return self._revision

    def remove(self, key: str) -> None:
        if key in self.values:
            self._revision += 1
            self._forget(key)
            self._tell(key, None)

    def tell_again(self, owner: Owner) -> None:
        """The owner's connection came back."""
        for watch in self.watches:
            if watch.owner is owner:
                watch.changes.put_nowait(None)

    def _forget(self, key: str) -> None:
        old = self.values.pop(key, None)
        if old is not None and old.expiry is not None:
            old.expiry.cancel()

    def _tell(self, key: str, payload: bytes | None) -> None:
        for watch in self.watches:
            if watch.owner.connected:
                watch.changes.put_nowait((key, payload, self._revision))


class MemoryKeyValueStore(Generic[M]):
    """One bus's view of a bucket."""

    def __init__(self, owner: Owner, bucket: MemoryBucket, channel: Channel[M]) -> None:
        self._owner = owner
        self._bucket = bucket
        self._channel = channel

    async def put(self, value: M) -> int:
        self._must_be_connected()
        return self._bucket.store(self._key(value), pack(value))

    async def create(self, value: M) -> int:
        self._must_be_connected()
        key = self._key(value)
        if key in self._bucket.values:
            raise WrongRevision(f"{key} exists")
        return self._bucket.store(key, pack(value))

    async def update(self, value: M, revision: int) -> int:
        self._must_be_connected()
        key = self._key(value)
        stored = self._bucket.values.get(key)
        if stored is None or stored.revision != revision:
            raise WrongRevision(f"{key} is not at revision {revision}")
        return self._bucket.store(key, pack(value))

    async def get(self, key: str) -> StoredValue[M] | None:
        self._must_be_connected()
        stored = self._bucket.values.get(key)
        return None if stored is None else self._read(key, stored.payload, stored.revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        self._must_be_connected()
        stored = self._bucket.values.get(key)
        if revision is not None and (stored is None or stored.revision != revision):
            raise WrongRevision(f"{key} is not at revision {revision}")
        self._bucket.remove(key)

    async def all(self, prefixes: tuple[str, ...] = ("",)) -> list[StoredValue[M]]:
        self._must_be_connected()
        return [value for value in self._live() if value.key.startswith(prefixes)]

    async def watch(self) -> AsyncIterator[StoredValue[M] | None]:
        watch = _Watch(self._owner)
        self._bucket.watches.append(watch)
        told: dict[str, int] = {}
        try:
            while True:
                watch.changes = asyncio.Queue()
                live = self._live()
                for gone in told.keys() - {value.key for value in live}:
                    yield StoredValue(gone, None, told[gone])
                told = {value.key: value.revision for value in live}
                for value in live:
                    yield value
                yield None
                while (change := await watch.changes.get()) is not None:
                    key, payload, revision = change
                    changed = (
                        StoredValue(key, None, revision) if payload is None else self._read(key, payload, revision)
                    )
                    if changed is not None:
                        told[key] = revision
                        yield changed
        finally:
            self._bucket.watches.remove(watch)

    def _live(self) -> list[StoredValue[M]]:
        found = [self._read(key, stored.payload, stored.revision) for key, stored in self._bucket.values.items()]
        return [value for value in found if value is not None]

    def _read(self, key: str, payload: bytes, revision: int) -> StoredValue[M] | None:
        try:
            return StoredValue(key, read_entry(self._channel, key, payload), revision)
        except BadMessage as bad:
            count_bad(self._owner.counts, self._channel.subject, bad)
            return None

    def _key(self, value: M) -> str:
        return self._channel.address(value).partition(".")[2]

    def _must_be_connected(self) -> None:
        if not self._owner.connected:
            raise BusDown("the memory bus is down")
