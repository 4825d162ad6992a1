"""A key-value store in a JetStream bucket.

JetStream's own ways to follow a bucket need a consumer, which delivers stored bytes to any subject its maker names (see
``permissions``). Instead the server republishes each value that it has stored, with its revision; a watch subscribes to
that, then reads what is stored, and merges both by revision. NATS does not announce that a value has expired: the
watch knows when it should have, and then asks the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

import msgspec

from shared.bus.jetstream import BucketStream, Present, Requester
from shared.bus.nats_reader import Take
from shared.bus.outage import Outage
from shared.bus.port import BusCounts, BusError, StoredValue, Subscription, WrongRevision
from shared.bus.receiver import count_bad, read_entry
from shared.bus.wire import BadMessage, pack
from shared.contracts.channels import Channel, bucket_of, key_of, stored_subject, stream_of

log = logging.getLogger("baton.bus")

M = TypeVar("M", bound=msgspec.Struct)

WATCH_RETRY_S = 0.2
EXPIRY_RETRY_S = 0.25
"""The server deletes an expired value a little late; so long after that time, and again, the watch asks for it."""
CHANGES_MAX = 65536
"""Changes that a watch holds for its reader; beyond, it reads all values again."""
SEQUENCE_HEADER, STREAM_HEADER = "Nats-Sequence", "Nats-Stream"


class Owner(Requester, Protocol):
    """The bus that opened the store."""

    counts: BusCounts
    reconnected: list[Callable[[], None]]

    @property
    def connected(self) -> bool: ...

    async def listen(self, subject: str, take: Take) -> Subscription:
        """Pass every message to ``take``. Raises BusDown."""


class NatsKeyValueStore(Generic[M]):
    """The entries of one KEY_VALUE channel."""

    def __init__(self, owner: Owner, channel: Channel[M]) -> None:
        self._owner = owner
        self._channel = channel
        self._bucket = bucket_of(channel)
        self._stream = BucketStream(owner, self._bucket)
        self._outage = Outage(log)

    async def open(self) -> None:
        """Raises BusDown if the bucket does not exist."""
        await self._stream.must_exist()

    async def put(self, value: M) -> int:
        return await self._stream.write(*self._pack(value))

    async def create(self, value: M) -> int:
        key, payload = self._pack(value)
        try:
            return await self._stream.write(key, payload, 0)
        except WrongRevision:
            newest = await self._stream.newest(key)
            if newest is None or not newest.data:  # Deleted, or expired just now.
                return await self._stream.write(key, payload, newest.seq if newest is not None else 0)
            raise

    async def update(self, value: M, revision: int) -> int:
        return await self._stream.write(*self._pack(value), revision)

    async def get(self, key: str) -> StoredValue[M] | None:
        newest = await self._stream.newest(key)
        return None if newest is None else self._read(key, newest.data, newest.seq)

    async def delete(self, key: str, revision: int | None = None) -> None:
        await self._stream.write(key, b"", revision)

    async def all(self, prefixes: tuple[str, ...] = ("",)) -> list[StoredValue[M]]:
        present = await self._stream.present(prefixes)
        read = (self._read(one.key, one.data, one.seq) for one in present.messages)
        return [value for value in read if value is not None]

    async def watch(self) -> AsyncIterator[StoredValue[M] | None]:
        changes = _Changes(self._bucket, self._owner.counts)
        known = _Known(asyncio.get_running_loop().time)
        subscription = await self._listen(changes)
        self._owner.reconnected.append(changes.read_again)
        try:
            while True:
                if changes.must_read:
                    for value in await self._read_all(changes, known):
                        yield value
                    yield None
                while (change := changes.next()) is not None:
                    if (changed := self._changed(known, *change)) is not None:
                        yield changed
                for gone in await self._expired(known, changes):
                    yield gone
                # After the reconnection it reads all entries again.
                await changes.wait(known.next_at if self._owner.connected else None)
        finally:
            self._owner.reconnected.remove(changes.read_again)
            await subscription.close()

    async def _listen(self, changes: _Changes) -> Subscription:
        while True:
            try:
                return await self._owner.listen(stored_subject(self._bucket, "*"), changes.take)
            except BusError as error:
                self._outage.failed(f"cannot watch {self._bucket}", error)
                await asyncio.sleep(WATCH_RETRY_S)

    async def _read_all(self, changes: _Changes, known: _Known) -> list[StoredValue[M]]:
        """All entries, after a deletion for each that is known and gone. Retries until NATS answers."""
        present = await self._present(changes)
        before = known.begin(present.ttl_s)
        live = []
        for one in present.messages:
            value = self._read(one.key, one.data, one.seq)
            if value is not None:
                known.note(one.key, one.seq, present.age_s(one))
                live.append(value)
        while (change := changes.next()) is not None:  # stored before or while all was read
            changed = self._changed(known, *change)
            if changed is not None:
                live.append(changed)
        changes.begin_after(present.last_revision)
        gone: list[StoredValue[M]] = [
            StoredValue(key, None, before[key]) for key in before if key not in known.revisions
        ]
        return gone + live

    async def _present(self, changes: _Changes) -> Present:
        while True:
            changes.must_read = False
            try:
                present = await self._stream.present()
            except BusError as error:
                self._outage.failed(f"cannot read {self._bucket}", error)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            self._outage.over()
            if not changes.must_read:
                return present

    def _changed(self, known: _Known, key: str, payload: bytes, revision: int) -> StoredValue[M] | None:
        """What is new to the watch; None if nothing is."""
        if revision <= known.revisions.get(key, 0):
            return None
        value = self._read(key, payload, revision)
        if value is not None:
            known.note(key, revision)
            return value
        return StoredValue(key, None, revision) if known.revisions.pop(key, None) is not None else None

    async def _expired(self, known: _Known, changes: _Changes) -> list[StoredValue[M]]:
        """Changes of entries whose time has passed, as the server sees them."""
        found: list[StoredValue[M]] = []
        for key in known.due():
            revision = known.revisions[key]
            try:
                newest = await self._stream.newest(key)
            except BusError as error:
                self._outage.failed(f"cannot see whether {self._bucket}.{key} has expired", error)
                known.ask_again(key)
                return found
            self._outage.over()
            if newest is None:
                del known.revisions[key]
                found.append(StoredValue(key, None, revision))
            elif newest.seq == revision:
                known.ask_again(key)
            elif newest.seq > revision:
                changed = self._changed(known, key, newest.data, newest.seq)
                if changed is not None:
                    found.append(changed)
            else:  # The stream was made anew.
                changes.read_again()
                return found
        return found

    def _pack(self, value: M) -> tuple[str, bytes]:
        return key_of(self._channel.address(value)), pack(value)

    def _read(self, key: str, payload: bytes, revision: int) -> StoredValue[M] | None:
        """The entry, or None for deletions and unreadable values."""
        if not payload:
            return None
        try:
            return StoredValue(key, read_entry(self._channel, key, payload), revision)
        except BadMessage as bad:
            count_bad(self._owner.counts, self._channel.subject, bad)
            return None


class _Known:
    """The entries that a watch has yielded, and when each expires if it is not renewed."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.revisions: dict[str, int] = {}
        self._now = now
        self._ttl_s = 0.0
        self._checks: list[tuple[float, str, int]] = []
        """A heap. Checks of revisions that were renewed meanwhile remain in it until their time."""

    def begin(self, ttl_s: float) -> dict[str, int]:
        """Forget everything, and return the revisions that were known."""
        before, self.revisions = self.revisions, {}
        self._ttl_s, self._checks = ttl_s, []
        return before

    def note(self, key: str, revision: int, age_s: float = 0.0) -> None:
        """An entry was written ``age_s`` ago."""
        self.revisions[key] = revision
        if self._ttl_s:
            heappush(self._checks, (self._now() + self._ttl_s - age_s, key, revision))

    def ask_again(self, key: str) -> None:
        """The server still has it."""
        heappush(self._checks, (self._now() + EXPIRY_RETRY_S, key, self.revisions[key]))

    def due(self) -> Iterator[str]:
        """Keys of entries that should have expired by now."""
        now = self._now()
        while self._checks and self._checks[0][0] <= now:
            _at, key, revision = heappop(self._checks)
            if self.revisions.get(key) == revision:
                yield key

    @property
    def next_at(self) -> float | None:
        return self._checks[0][0] if self._checks else None


class _Changes:
    """What a watch has heard and its reader has not."""

    def __init__(self, bucket: str, counts: BusCounts) -> None:
        self.must_read = True
        """All entries must be read: at the start, and when changes may have been missed."""
        self._stream = stream_of(bucket)
        self._counts = counts
        self._changes: deque[tuple[str, bytes, int]] = deque()
        self._newest = 0
        self._heard = asyncio.Event()

    def read_again(self) -> None:
        """What was heard so far is not needed."""
        self.must_read = True
        self._changes.clear()
        self._newest = 0
        self._heard.set()

    def take(self, payload: bytes, headers: dict[str, str], subject: str) -> None:
        """A message on the subject of stored values. Only the server publishes there and adds these headers; a reply
        that another party directs there has none.
        """
        sequence = headers.get(SEQUENCE_HEADER, "")
        if headers.get(STREAM_HEADER) != self._stream or not sequence.isdecimal():
            count_bad(self._counts, subject, BadMessage("it is no stored value"))
            return
        if len(self._changes) >= CHANGES_MAX:
            self.read_again()
        self._changes.append((subject.rpartition(".")[2], payload, int(sequence)))
        self._heard.set()

    def next(self) -> tuple[str, bytes, int] | None:
        """The next change; None if there is none, or all entries must be read again."""
        if self.must_read or not self._changes:
            return None
        change = self._changes.popleft()
        if change[2] <= self._newest:
            self.read_again()
            return None
        self._newest = change[2]
        return change

    def begin_after(self, revision: int) -> None:
        """A later change with an earlier revision shows that the stream was made anew."""
        self._newest = max(self._newest, revision)

    async def wait(self, until: float | None) -> None:
        """Until there is a change, or for ``until`` in the event loop's time."""
        try:
            async with asyncio.timeout_at(until):
                await self._heard.wait()
        except TimeoutError:
            return
        self._heard.clear()
