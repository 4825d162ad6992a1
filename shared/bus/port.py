"""The bus as services use it: publish, subscribe, ask and answer, and key-value stores. ``nats_bus`` implements it.

Guarantees:

* Messages of one sender on one channel arrive in order, at most once.
* A message larger than the server's limit travels in parts and arrives whole; beyond ``frame_budget_bytes`` it
  is refused with ``MessageTooLarge`` before anything is sent.
* A subscription is live when ``subscribe`` or ``answer`` returns; if the connection is down, when it is back.
* A handler runs on the event loop, one message at a time per subscription, in order. A handler that raises ends the
  bus (see ``failed``), so that bugs are not hidden. A message that cannot be unpacked, or whose ids differ from those
  of its subject, is counted and logged, never raised.
* After a reconnection, subscriptions and watches of key-value stores continue by themselves.
* Nothing is buffered while the connection is down: ``publish`` and ``ask`` raise ``BusDown`` at once, and messages that
  had not left the process when the connection broke are dropped. No command arrives minutes after its sender gave up.
* Every subscription's queue is bounded; a dropped message is counted (``dropped``) and reported to ``on_dropped``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shared.contracts.channels import AskChannel, Channel
from shared.contracts.failures import Failure

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)
log = logging.getLogger("baton.bus")


class BusError(Exception):
    """A failure of the bus that the caller can handle."""


class BusDown(BusError):
    """NATS cannot be reached at present."""


class Disconnected(BusDown):
    """The connection to NATS is lost; the bus connects again by itself."""


class BusRefused(BusDown):
    """NATS and this process reject each other's credentials: a retry needs another configuration."""


class NoResponders(BusError):
    """The subject has no subscriber; raised at once."""


class AskTimedOut(BusError):
    """The subject has a subscriber, but no reply came in time."""


class AskRefused(BusError):
    """The responder refused; ``failure`` has the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure


class MessageTooLarge(BusError):
    """The message exceeds ``frame_budget_bytes``; nothing was sent."""


class WrongRevision(BusError):
    """The entry has another revision: another process wrote it first."""


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """Headers of a message, such as trace context (W3C names, lower case), and its size in bytes."""

    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True, slots=True)
class StoredValue(Generic[M]):
    """An entry of a key-value store. A watch yields ``value`` None for an entry that was deleted or expired."""

    key: str
    value: M | None
    revision: int


@dataclass(slots=True)
class BusCounts:
    """Errors of a bus since it was opened, for metrics."""

    dropped: int = 0
    """Messages dropped because a subscriber of this process was too slow."""
    bad_messages: int = 0
    """Messages that could not be unpacked, or that name what is not their sender's: ids other than those of their
    subject, or a leg of another worker.
    """
    parts_lost: int = 0
    """Messages in parts of which one part never arrived."""
    reconnects: int = 0
    certificate_ends_at: float = 0.0
    """When the server's certificate expires, in Unix time; 0 if the connection is not encrypted."""


Handler = Callable[[M, Envelope], Awaitable[None] | None]
"""A plain function that returns None, called while the message is read; or a coroutine function with a queue."""
Responder = Callable[[M, Envelope], Awaitable[A]]
"""May raise ``AskRefused`` to reply with a failure."""


class Subscription(Protocol):
    @property
    def dropped(self) -> int:
        """Messages dropped because this subscriber was too slow."""

    async def close(self) -> None:
        """Unsubscribe; messages not yet handled are dropped."""


class KeyValueStore(Protocol[M]):
    """The entries of one KEY_VALUE channel. All methods but ``watch`` raise BusDown."""

    async def put(self, value: M) -> int:
        """Write unconditionally. Returns the revision."""

    async def create(self, value: M) -> int:
        """Write only if the key is absent; deleted and expired entries count as absent. Raises WrongRevision."""

    async def update(self, value: M, revision: int) -> int:
        """Replace that revision. Raises WrongRevision."""

    async def get(self, key: str) -> StoredValue[M] | None:
        """The current entry, or None."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove, only that revision if given; watchers see that. Raises WrongRevision."""

    async def all(self, prefixes: tuple[str, ...] = ("",)) -> list[StoredValue[M]]:
        """Every current entry whose key begins with one of ``prefixes``."""

    def watch(self) -> AsyncIterator[StoredValue[M] | None]:
        """Yields every current entry, then None once, then each change. After a reconnection all of that again, with a
        deletion for each entry that disappeared meanwhile.
        """


class Bus(Protocol):
    @property
    def max_payload(self) -> int:
        """Largest single NATS message, bytes."""

    @property
    def frame_budget_bytes(self) -> int:
        """Largest message, in parts if necessary."""

    @property
    def connected(self) -> bool:
        """Whether the server can be reached at present."""

    @property
    def reads(self) -> int:
        """How often something came from the server. It replies to a ping each second: one that is silent for longer
        hangs, or is cut off, seconds before ``connected`` tells.
        """

    @property
    def counts(self) -> BusCounts:
        """Live counters."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Carries the exception once a handler has raised or the connection is closed permanently."""

    def end_with(self, task: asyncio.Task[None]) -> None:
        """Done-callback for a task that works for this bus: its exception ends the bus, like one of a handler."""

    async def publish(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> None:
        """Send without waiting for receipt. ``on_unreachable`` handlers get ``key`` if the subject has no subscriber.

        Raises MessageTooLarge, BusDown.
        """

    def publish_now(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> bool:
        """As ``publish``, without a coroutine. False: the message was not sent, because it has to wait for the socket
        or travels in parts: only ``publish`` does that.

        Raises MessageTooLarge, BusDown.
        """

    def hold(self) -> None:
        """Hold back what is published from now on, so that ``release`` sends it in one write to the socket. It must
        follow before anything is awaited.
        """

    def release(self) -> None:
        """Send what ``hold`` has held back."""

    def on_unreachable(self, handler: Callable[[str], None]) -> None:
        """Call ``handler(key)`` for each message with a key (a subject token) whose subject has no subscriber."""

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` when the connection is lost."""

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` after a reconnection: events may have been missed."""

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
        """Handle each message. ``ids`` fix placeholders of the subject; the others match any value. ``in_batches``:
        where many arrive, they are read together and up to ``BATCH_S`` late, which takes less CPU; ``on_dropped`` is
        called after a reconnection, too.
        """

    async def ask(
        self, channel: AskChannel[M, A], message: M, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> A:
        """One reply. Raises NoResponders (at once), AskTimedOut, AskRefused, MessageTooLarge, BusDown."""

    async def answer(self, channel: AskChannel[M, A], responder: Responder[M, A], **ids: str) -> Subscription:
        """Reply to each ask, to at most ``ASKS_AT_ONCE_MAX`` of them concurrently."""

    async def key_value_store(self, channel: Channel[M]) -> KeyValueStore[M]:
        """The store of a KEY_VALUE channel. Raises BusDown while it has no bucket: an orchestrator makes it."""

    async def make_bucket(
        self, channel: Channel[Any], *, ttl_s: float | None, file_bytes_max: int = 0, drops_oldest: bool = False
    ) -> None:
        """Make the bucket of a KEY_VALUE channel, or put its configuration right; only an orchestrator may. An entry
        that is not renewed within ``ttl_s`` expires. Entries that expire are lost when NATS restarts, unless
        ``file_bytes_max`` keeps them in files of at most that size. ``drops_oldest``: a full bucket drops its
        oldest entries instead of refusing new ones. Raises BusDown.
        """

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything published has reached the server. Raises BusDown."""

    async def close(self) -> None:
        """Flush and close; idempotent."""


ASKS_AT_ONCE_MAX = 64
BATCH_S = 0.005
"""See ``Bus.subscribe``."""
STORE_RETRY_S = 2.0


async def watch_store(bus: Bus, channel: Channel[M]) -> AsyncIterator[StoredValue[M] | None]:
    """``KeyValueStore.watch``, once there is a bucket: waits for one, and never ends. The first failure in a row is
    logged as information, further ones for debugging.
    """
    level = logging.INFO
    while True:
        try:
            store = await bus.key_value_store(channel)
            level = logging.INFO
            async for entry in store.watch():
                yield entry
        except BusError as error:
            log.log(level, "%s cannot be read, trying again: %s", channel.subject, error)
            level = logging.DEBUG
        await asyncio.sleep(STORE_RETRY_S)


class Connection:
    """What every implementation of the bus shares. Handlers are called in the order of their registration; ``failed``
    carries the exception that ended the bus.
    """

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unreachable: list[Callable[[str], None]] = []
        self.disconnected: list[Callable[[], None]] = []
        self.reconnected: list[Callable[[], None]] = []

    def on_unreachable(self, handler: Callable[[str], None]) -> None:
        self.unreachable.append(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        self.disconnected.append(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        self.reconnected.append(handler)

    def fail(self, why: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(why)
            self.failed.exception()  # Marks it as retrieved: asyncio warns about unread exceptions.

    def end_with(self, task: asyncio.Task[None]) -> None:
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            log.error("the task %s raised: the bus ends", task.get_name(), exc_info=bug)
            self.fail(bug)
