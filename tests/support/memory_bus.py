"""The bus inside one process, for tests: several buses on one hub stand for several processes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from shared.bus.port import (
    ASKS_AT_ONCE_MAX,
    AskTimedOut,
    BusCounts,
    BusDown,
    Connection,
    Envelope,
    Handler,
    KeyValueStore,
    MessageTooLarge,
    NoResponders,
    Responder,
    Subscription,
)
from shared.bus.receiver import Receiver, Reply, count_bad, make_reply, read_reply, unreadable
from shared.bus.wire import BadMessage, can_be_sent_to, pack
from shared.contracts.channels import AskChannel, Channel, bucket_of
from tests.support.memory_kv_store import MemoryBucket, MemoryKeyValueStore

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

MAX_PAYLOAD_BYTES = 1024 * 1024
FRAME_BUDGET_BYTES = 64 * 1024 * 1024

Take = Callable[[bytes, Mapping[str, str], str, "asyncio.Future[Reply] | None"], Awaitable[None]]
"""Payload, headers, subject, and where an answer goes."""


class MemoryHub:
    """What the buses have in common: the subscriptions, and the values of key-value stores."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[_MemorySubscription]] = {}
        self._matches: dict[str, list[_MemorySubscription]] = {}
        self.buckets: dict[str, MemoryBucket] = defaultdict(MemoryBucket)
        self.is_frozen = False
        self._held: list[tuple[str, bytes, Mapping[str, str], asyncio.Future[Reply] | None]] = []
        """What came while it was frozen."""

    def freeze(self) -> None:
        """As NATS after SIGSTOP: connections stay, and nothing is delivered."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Deliver what came meanwhile."""
        self.is_frozen = False
        held, self._held = self._held, []
        for subject, payload, headers, answer in held:
            self.deliver(subject, payload, headers, answer)

    def join(self, subscription: _MemorySubscription) -> None:
        self._listeners.setdefault(subscription.filter, []).append(subscription)
        self._matches.clear()

    def leave(self, subscription: _MemorySubscription) -> None:
        here = self._listeners.get(subscription.filter, [])
        if subscription in here:
            here.remove(subscription)
        self._matches.clear()

    def forget(self, bus: MemoryBus) -> None:
        """Nobody there listens any more."""
        for here in self._listeners.values():
            here[:] = [one for one in here if one.bus is not bus]
        self._matches.clear()

    def deliver(
        self, subject: str, payload: bytes, headers: Mapping[str, str], answer: asyncio.Future[Reply] | None = None
    ) -> int:
        """Give raw bytes to everyone who listens; answers how many there are."""
        if not can_be_sent_to(subject):
            return 0
        if self.is_frozen:
            self._held.append((subject, payload, headers, answer))
            return 1
        found = self._matches.get(subject)
        if found is None:
            found = [one for listed, here in self._listeners.items() if _matches(listed, subject) for one in here]
            self._matches[subject] = found
        reached = [one for one in found if one.bus.connected]
        for one in reached:
            one.offer(payload, headers, subject, answer)
        return len(reached)


def _matches(listed: str, subject: str) -> bool:
    want, have = listed.split("."), subject.split(".")
    return len(want) == len(have) and all(w in ("*", h) for w, h in zip(want, have, strict=True))


class _MemorySubscription:
    def __init__(
        self, bus: MemoryBus, subject: str, take: Take, queue_max: int, on_dropped: Callable[[], None] | None
    ) -> None:
        self.bus = bus
        self.filter = subject
        self.dropped = 0
        self._take = take
        self._on_dropped = on_dropped
        self._queue: asyncio.Queue[tuple[bytes, Mapping[str, str], str, asyncio.Future[Reply] | None]] = asyncio.Queue(
            queue_max
        )
        self._pump = bus.spawn(self._run(), f"memory-bus {subject}")
        bus.hub.join(self)

    def offer(
        self, payload: bytes, headers: Mapping[str, str], subject: str, answer: asyncio.Future[Reply] | None
    ) -> None:
        try:
            self._queue.put_nowait((payload, headers, subject, answer))
        except asyncio.QueueFull:
            self.dropped += 1
            self.bus.counts.dropped += 1
            if self._on_dropped is not None:
                self._on_dropped()

    async def _run(self) -> None:
        while True:
            await self._take(*await self._queue.get())

    async def close(self) -> None:
        self.bus.hub.leave(self)
        self._pump.cancel()


class MemoryBus(Connection):
    """One process's end of a hub. ``lose`` and ``restore`` play a lost connection."""

    def __init__(
        self, hub: MemoryHub, *, max_payload: int = MAX_PAYLOAD_BYTES, frame_budget_bytes: int = FRAME_BUDGET_BYTES
    ) -> None:
        super().__init__()
        self.hub = hub
        self.max_payload = max_payload
        self.frame_budget_bytes = frame_budget_bytes
        self.connected = True
        self.counts = BusCounts()
        self._reads = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._asks: set[asyncio.Future[Reply]] = set()

    @property
    def reads(self) -> int:
        """A server that is not frozen has said something whenever this is asked."""
        self._reads += not self.hub.is_frozen
        return self._reads

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with this bus."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def lose(self) -> None:
        """The connection breaks."""
        self.connected = False
        for asked in self._asks:
            if not asked.done():
                asked.set_exception(BusDown("the connection was lost"))
        for handler in self.disconnected:
            handler()

    def restore(self) -> None:
        """The connection is back."""
        self.connected = True
        self.counts.reconnects += 1
        for bucket in self.hub.buckets.values():
            bucket.tell_again(self)
        for handler in self.reconnected:
            handler()

    async def publish(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> None:
        self.publish_now(channel, message, headers=headers, key=key)

    def hold(self) -> None:
        """Nothing to do: what is published is handled later in any case."""

    def release(self) -> None:
        """As ``hold``."""

    def publish_now(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> bool:
        reached = self.hub.deliver(channel.address(message), self._pack(message), headers or {})
        if key and not reached:
            for handler in self.unreachable:
                asyncio.get_running_loop().call_soon(handler, key)
        return True

    async def subscribe(
        self,
        channel: Channel[M],
        handler: Handler[M],
        *,
        queue_max: int = 65536,
        on_dropped: Callable[[], None] | None = None,
        in_batches: bool = False,
        **ids: str,
    ) -> Subscription:
        if in_batches and on_dropped is not None:
            self.on_reconnect(on_dropped)
        receiver = Receiver(channel, handler, self.counts, self.fail)

        async def take(payload: bytes, headers: Mapping[str, str], subject: str, _answer: object) -> None:
            if receiver.is_async:
                await receiver.take(payload, headers, subject)
            else:
                receiver.take_now(payload, headers, subject)

        return _MemorySubscription(self, channel.filter(**ids), take, queue_max, on_dropped)

    async def ask(
        self, channel: AskChannel[M, A], message: M, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> A:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if not self.hub.deliver(channel.address(message), self._pack(message), headers or {}, answer):
            raise NoResponders(f"{channel.address(message)} has no subscriber")
        self._asks.add(answer)
        try:
            return read_reply(await asyncio.wait_for(answer, timeout_s), channel, message)
        except TimeoutError as late:
            raise AskTimedOut(f"{channel.address(message)}: no answer within {timeout_s} s") from late
        finally:
            self._asks.discard(answer)

    async def answer(self, channel: AskChannel[M, A], responder: Responder[M, A], **ids: str) -> Subscription:
        side_by_side = asyncio.Semaphore(ASKS_AT_ONCE_MAX)

        async def reply(
            payload: bytes, headers: Mapping[str, str], subject: str, answer: asyncio.Future[Reply]
        ) -> None:
            try:
                envelope = Envelope(headers, len(payload))
                made = await make_reply(channel, responder, payload, subject, envelope, self.frame_budget_bytes)
            except BadMessage as bad:
                count_bad(self.counts, subject, bad)
                made = unreadable(bad)
            except Exception as bug:
                self.fail(bug)
                return
            finally:
                side_by_side.release()
            if not answer.done():
                answer.set_result(made)

        async def take(
            payload: bytes, headers: Mapping[str, str], subject: str, answer: asyncio.Future[Reply] | None
        ) -> None:
            if answer is not None:
                await side_by_side.acquire()
                self.spawn(reply(payload, headers, subject, answer), f"answer {channel.subject}")

        return _MemorySubscription(self, channel.filter(**ids), take, 65536, None)

    async def key_value_store(self, channel: Channel[M]) -> KeyValueStore[M]:
        return MemoryKeyValueStore(self, self.hub.buckets[bucket_of(channel)], channel)

    async def make_bucket(
        self, channel: Channel[Any], *, ttl_s: float | None, file_bytes_max: int = 0, drops_oldest: bool = False
    ) -> None:
        del file_bytes_max, drops_oldest
        self.hub.buckets[bucket_of(channel)].ttl_s = ttl_s

    async def flush(self, timeout_s: float) -> None:
        del timeout_s
        if not self.connected:
            raise BusDown("the memory bus is down")

    async def close(self) -> None:
        self.connected = False
        self.hub.forget(self)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pack(self, message: msgspec.Struct) -> bytes:
        if not self.connected:
            raise BusDown("the memory bus is down")
        payload = pack(message)
        if len(payload) > self.frame_budget_bytes:
            raise MessageTooLarge(f"{len(payload)} bytes; at most {self.frame_budget_bytes}")
        return payload
