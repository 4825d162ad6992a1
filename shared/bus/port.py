"""The bus as services see it: publish, subscribe, ask, answer, and kept values. Two implementations keep one promise.

``shared.bus.nats_bus`` is the real one; ``tests.support.memory_bus`` is for tests and runs the same conformance suite.

Promises:

* Messages of one sender on one channel arrive in order, at most once.
* A message larger than the server's limit travels in parts and arrives whole; beyond ``frame_budget_bytes`` it is
  refused with ``MessageTooLarge`` before anything is sent.
* A subscription is live when ``subscribe`` or ``answer`` returns.
* A handler runs on the event loop, one message at a time per subscription, in order. A handler that raises ends the
  bus (see ``failed``): a bug is not hidden. Messages that cannot be unpacked, or that name
  other ids than their subject does, are counted and logged, never raised.
* When the connection is lost, subscriptions come back by themselves; kept values are watched anew.
* Nothing is buffered for a connection that is down: ``publish`` and ``ask`` raise ``BusDown`` at once, and what had
  not left the process when the connection broke is thrown away. No command arrives minutes after its sender gave up.
* Every subscription's queue is bounded; what is dropped is counted (``dropped``) and told to ``on_dropped``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from shared.contracts.channels import AskChannel, Channel
from shared.contracts.failures import Failure

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class BusError(Exception):
    """Something about the bus that the caller can answer."""


class BusDown(BusError):
    """NATS cannot be reached just now."""


class NoResponders(BusError):
    """Nobody listens on the subject; known at once."""


class AskTimedOut(BusError):
    """Somebody listens, but did not answer in time."""


class AskRefused(BusError):
    """The answerer said no; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure


class MessageTooLarge(BusError):
    """The message is beyond ``frame_budget_bytes``; nothing was sent."""


class WrongRevision(BusError):
    """A kept value changed meanwhile: somebody else was first."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What came with a message: trace context and the like (W3C names, lower case)."""

    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True, slots=True)
class StoredValue(Generic[M]):
    """A kept value as a watcher sees it; ``value`` is None when it was deleted or expired."""

    key: str
    value: M | None
    revision: int


@dataclass(slots=True)
class BusCounts:
    """What went wrong on a bus since it was opened; for metrics."""

    dropped: int = 0
    """Messages lost because a subscriber of this process was too slow."""
    bad_messages: int = 0
    """Messages that could not be unpacked, or whose ids were not those of their subject."""
    parts_lost: int = 0
    """Messages in parts of which a part never came."""
    reconnects: int = 0


Handler = Callable[[M, Envelope], Awaitable[None] | None]
"""A plain function that returns None, called as the message is read and never too slow; or a coroutine function."""
Answerer = Callable[[M, Envelope], Awaitable[A]]
"""May raise ``AskRefused`` to answer with a failure."""


class Subscription(Protocol):
    """A live subscription."""

    @property
    def dropped(self) -> int:
        """Messages lost because this subscriber was too slow."""

    async def close(self) -> None:
        """Stop; messages not yet handled are discarded."""


class KeyValueStore(Protocol[M]):
    """The values of one KEY_VALUE channel. A value not renewed within ``ttl_s`` expires; watchers are told."""

    async def put(self, value: M) -> int:
        """Write, whatever was there; answers the revision."""

    async def create(self, value: M) -> int:
        """Write only if there is none (deleted and expired count as none). Raises WrongRevision."""

    async def update(self, value: M, revision: int) -> int:
        """Write only over that revision. Raises WrongRevision."""

    async def get(self, key: str) -> StoredValue[M] | None:
        """The value now, or None."""

    async def delete(self, key: str) -> None:
        """Remove; watchers are told."""

    async def all(self) -> list[StoredValue[M]]:
        """Every live value now."""

    def watch(self) -> AsyncIterator[StoredValue[M] | None]:
        """Every live value, then None once, then each change. After a reconnection everything is told again, with
        deletions for what vanished meanwhile, and None once more.
        """


class Bus(Protocol):
    """See the module's promises."""

    @property
    def max_payload(self) -> int:
        """Largest single NATS message, bytes."""

    @property
    def frame_budget_bytes(self) -> int:
        """Largest message in parts."""

    @property
    def connected(self) -> bool:
        """Whether the server is reached just now."""

    @property
    def counts(self) -> BusCounts:
        """Live counters."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Never done, until a handler raises or the connection is closed for good: then it carries the exception."""

    def end_with(self, task: asyncio.Task[None]) -> None:
        """Done-callback of a task that works for this bus: an exception in it ends the bus, like one in a handler."""

    async def publish(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> None:
        """Send and forget. ``key`` names this message to the ``on_unreachable`` handler if nobody listens.

        Raises MessageTooLarge, BusDown.
        """

    def on_unreachable(self, handler: Callable[[str], None]) -> None:
        """Call ``handler(key)`` for each message published with a key (a subject token) that nobody listened to."""

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` when the connection is lost."""

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` after the connection came back: events may have been missed meanwhile."""

    async def subscribe(
        self,
        channel: Channel[M],
        handler: Handler[M],
        *,
        queue_max: int = 65536,
        on_dropped: Callable[[], None] | None = None,
        **ids: str,
    ) -> Subscription:
        """Handle each message; ``ids`` fix placeholders of the subject, the others match anything."""

    async def ask(
        self,
        channel: AskChannel[M, A],
        message: M,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> A:
        """One answer. Raises NoResponders (at once), AskTimedOut, AskRefused, MessageTooLarge, BusDown."""

    async def answer(self, channel: AskChannel[M, A], answerer: Answerer[M, A], **ids: str) -> Subscription:
        """Answer each ask; asks are answered side by side, at most ``ASKS_AT_ONCE_MAX``."""

    async def key_value_store(self, channel: Channel[M], *, ttl_s: float | None) -> KeyValueStore[M]:
        """The values of a KEY_VALUE channel; makes the bucket if there is none."""

    async def flush(self, timeout_s: float) -> None:
        """Everything published has reached the server."""

    async def close(self) -> None:
        """Say goodbye; idempotent."""


ASKS_AT_ONCE_MAX = 64
