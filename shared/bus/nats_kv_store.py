"""A key-value store in a JetStream bucket, with workarounds for these traps:

* Watchers see expiry only if the bucket has a ``limit_marker_ttl``; an expiry marker reads as an empty value.
* A watch stalls for many seconds after a server restart. It is opened again when the connection is back.
* A server that lost its storage has lost the bucket. It is created again at the next use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import msgspec
import nats.errors
import nats.js.errors as js_errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from shared.bus.port import BusCounts, BusDown, BusError, StoredValue, WrongRevision
from shared.bus.receiver import count_bad, read_entry
from shared.bus.wire import BadMessage, pack
from shared.contracts.channels import Channel
from shared.deadline import keep_cancellation

log = logging.getLogger("baton.bus")

M = TypeVar("M", bound=msgspec.Struct)
T = TypeVar("T")

REPLY_S_MAX = 5.0
"""JetStream counts as down if it does not reply within this."""
MARKER_S = 10.0
"""How long the marker of an expired value stays in the bucket."""
WATCH_RETRY_S = 0.2
WATCHER_IDLE_S_MAX = 60.0
"""The server drops a watch that its process no longer reads."""
DUPLICATE_WINDOW_S = 120.0
DIFFERENT_CONFIG = 10058


class Owner(Protocol):
    """The bus that opened the store."""

    counts: BusCounts

    @property
    def connected(self) -> bool: ...

    def on_reconnect(self, handler: Callable[[], None]) -> None: ...


class NatsKeyValueStore(Generic[M]):
    """The entries of one KEY_VALUE channel."""

    def __init__(self, owner: Owner, js: JetStreamContext, channel: Channel[M], ttl_s: float | None) -> None:
        self._owner = owner
        self._js = js
        self._channel = channel
        self._bucket = channel.subject.partition(".")[0]
        self._ttl_s = ttl_s
        self._kv: KeyValue | None = None
        self._watchers: set[KeyValue.KeyWatcher] = set()
        self._stops: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, owner: Owner, nc: Client, channel: Channel[M], ttl_s: float | None) -> NatsKeyValueStore[M]:
        """Create the bucket if it is missing. Raises BusDown."""
        store = cls(owner, nc.jetstream(timeout=REPLY_S_MAX), channel, ttl_s)
        with keep_cancellation(), _our_errors():
            await store._make_bucket()
        owner.on_reconnect(store._restart_watches)
        return store

    async def put(self, value: M) -> int:
        key, payload = self._pack(value)
        return await self._use(lambda kv: kv.put(key, payload))

    async def create(self, value: M) -> int:
        key, payload = self._pack(value)
        try:
            return await self._use(lambda kv: kv.update(key, payload, last=0))
        except WrongRevision:
            entry = await self._use(lambda kv: _newest(kv, key))
            if entry is None or not entry.value:  # Deleted or expired: only its marker is left.
                revision = entry.revision if entry is not None else 0
                return await self._use(lambda kv: kv.update(key, payload, last=revision))
            raise

    async def update(self, value: M, revision: int) -> int:
        key, payload = self._pack(value)
        return await self._use(lambda kv: kv.update(key, payload, last=revision))

    async def get(self, key: str) -> StoredValue[M] | None:
        entry = await self._use(lambda kv: _newest(kv, key))
        return None if entry is None else self._read(entry)

    async def delete(self, key: str) -> None:
        await self._use(lambda kv: kv.delete(key))

    async def all(self) -> list[StoredValue[M]]:
        watcher = await self._use(lambda kv: kv.watchall(inactive_threshold=WATCHER_IDLE_S_MAX))
        live: list[StoredValue[M]] = []
        try:
            async with asyncio.timeout(REPLY_S_MAX):
                async for entry in entries_of(watcher, self._has_entries):
                    if entry is None:
                        return live
                    value = self._read(entry)
                    if value is not None:
                        live.append(value)
        except TimeoutError as late:
            raise BusDown(f"{self._bucket}: JetStream did not reply within {REPLY_S_MAX} s") from late
        finally:
            await _stop(watcher)
        return live

    async def watch(self) -> AsyncIterator[StoredValue[M] | None]:
        known: dict[str, int] = {}
        while True:
            watcher = await self._new_watcher()
            seen: set[str] = set()
            complete = False
            try:
                # Ends when the connection is back; then all entries are yielded again.
                async for entry in entries_of(watcher, self._has_entries):
                    if entry is None:
                        for gone in known.keys() - seen:
                            yield StoredValue(gone, None, known.pop(gone))
                        complete = True
                        yield None
                        continue
                    value = self._read(entry)
                    if value is not None:
                        seen.add(entry.key)
                        known[entry.key] = value.revision
                        yield value
                    elif complete and known.pop(entry.key, None) is not None:
                        yield StoredValue(entry.key, None, entry.revision or 0)
            finally:
                self._watchers.discard(watcher)
                await _stop(watcher)

    async def _has_entries(self) -> bool:
        try:
            return bool((await self._use(lambda kv: kv.status())).values)
        except BusError:  # The connection is lost; the watch starts again.
            return False

    async def _new_watcher(self) -> KeyValue.KeyWatcher:
        while True:
            life = self._owner.counts.reconnects
            try:
                watcher = await self._use(lambda kv: kv.watchall(inactive_threshold=WATCHER_IDLE_S_MAX))
            except BusError as error:
                log.info("cannot watch %s yet, trying again: %s", self._bucket, error)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            if life == self._owner.counts.reconnects:
                self._watchers.add(watcher)
                return watcher
            await _stop(watcher)

    def _restart_watches(self) -> None:
        for watcher in self._watchers:
            stop = asyncio.get_running_loop().create_task(_stop(watcher), name=f"rewatch {self._bucket}")
            self._stops.add(stop)
            stop.add_done_callback(self._stops.discard)

    async def _use(self, operation: Callable[[KeyValue], Awaitable[T]]) -> T:
        """Run an operation; create the bucket again if the server lost it. Raises BusDown, WrongRevision."""
        if not self._owner.connected:
            raise BusDown("NATS cannot be reached")
        with keep_cancellation(), _our_errors():
            kv = self._kv or await self._make_bucket()
            try:
                return await operation(kv)
            except js_errors.KeyValueError:
                raise
            except (js_errors.NoStreamResponseError, js_errors.NotFoundError):
                log.warning("the server has lost the bucket %s: creating it again", self._bucket)
                return await operation(await self._make_bucket())

    async def _make_bucket(self) -> KeyValue:
        # Values that are renewed need no disk. On a full one the server would refuse them, until it is restarted.
        storage = StorageType.FILE if self._ttl_s is None else StorageType.MEMORY
        config = KeyValueConfig(
            bucket=self._bucket, history=1, ttl=self._ttl_s, storage=storage, limit_marker_ttl=MARKER_S
        )
        try:
            self._kv = await self._js.create_key_value(config)
        except js_errors.BadRequestError as error:
            if error.err_code != DIFFERENT_CONFIG:
                raise
            self._kv = await self._change_bucket()
        return self._kv

    async def _change_bucket(self) -> KeyValue:
        """The bucket exists with another expiry, from an older configuration: apply the present one."""
        info = await self._js.stream_info(f"KV_{self._bucket}")
        await self._js.update_stream(
            info.config.evolve(
                max_age=self._ttl_s or 0,
                duplicate_window=min(self._ttl_s or DUPLICATE_WINDOW_S, DUPLICATE_WINDOW_S),
                subject_delete_marker_ttl=MARKER_S,
            )
        )
        return await self._js.key_value(self._bucket)

    def _pack(self, value: M) -> tuple[str, bytes]:
        return self._channel.address(value).partition(".")[2], pack(value)

    def _read(self, entry: KeyValue.Entry) -> StoredValue[M] | None:
        """The entry, or None for markers and unreadable values."""
        if not entry.value:
            return None
        try:
            return StoredValue(entry.key, read_entry(self._channel, entry.key, entry.value), entry.revision or 0)
        except BadMessage as bad:
            count_bad(self._owner.counts, self._channel.subject, bad)
            return None


async def entries_of(
    watcher: AsyncIterable[KeyValue.Entry | None], has_entries: Callable[[], Awaitable[bool]]
) -> AsyncIterator[KeyValue.Entry | None]:
    """The watcher's entries, with None after the last entry that existed at the start.

    nats-py yields None at once if the server reports nothing pending, also while the first entries are still on their
    way. An early None is held back until the entry after which nothing is pending.
    """
    arrived = early = False
    async for entry in watcher:
        if entry is None and not arrived and await has_entries():
            early = True
            continue
        yield entry
        if entry is not None:
            arrived = True
            if early and not entry.delta:
                early = False
                yield None


async def _newest(kv: KeyValue, key: str) -> KeyValue.Entry | None:
    """The newest entry of the key, deletion and expiry markers included (their value is empty)."""
    try:
        return await kv.get(key)
    except js_errors.KeyNotFoundError as error:
        entry: KeyValue.Entry | None = error.entry
        return entry


async def _stop(watcher: KeyValue.KeyWatcher) -> None:
    try:
        with keep_cancellation():
            await watcher.stop()  # type: ignore[no-untyped-call]
    except nats.errors.Error as error:  # Already stopped, or the connection is closed.
        log.debug("watch: %r", error)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except js_errors.KeyWrongLastSequenceError as error:
        raise WrongRevision(str(error)) from error
    except (nats.errors.Error, TimeoutError) as error:
        raise BusDown(f"JetStream: {error!r}") from error
