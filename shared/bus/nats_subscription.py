"""Subscriptions of nats-py as ours: parts are put together, what is dropped is counted. ``Inbox`` gets the messages to
this connection: replies to its asks, and the server's notices that a subject has no subscriber.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared.bus.nats_client import DirectClient
from shared.bus.nats_reader import Take as Direct
from shared.bus.port import BusCounts, NoResponders
from shared.bus.receiver import Reply, count_bad
from shared.bus.wire import PART_HEADER, Assembler, BadMessage
from shared.contracts.channels import Channel
from shared.contracts.ids import is_subject_token
from shared.contracts.permissions import REPLIES

log = logging.getLogger("baton.bus")

Queued = Callable[[bytes, dict[str, str], str, str], Awaitable[None]]
Take = Direct | Queued
"""Whole payload, headers and subject of the (last) message that brought it. A plain function is called as the message
is read; a coroutine function gets a queue and a task, and the reply subject."""

HELD_BUDGETS_MAX: Final = 4
"""Half-built messages of one subscription hold at most this many times the frame budget."""

_NO_HEADERS: Final[dict[str, str]] = {}
REFUSED_HEADER: Final = "Baton-Refused"
"""Marks a reply that is a ``Failure``."""
TOKEN_BYTES: Final = 16
_STATUS_HEADER: Final = "Status"
_NO_RESPONDERS: Final = "503"


class LiveSubscription:
    def __init__(
        self,
        nc: DirectClient,
        take: Take,
        counts: BusCounts,
        *,
        frame_budget_bytes: int,
        on_dropped: Callable[[], None] | None,
        on_closed: Callable[[LiveSubscription], None],
    ) -> None:
        self.dropped = 0
        self.nats: NatsSubscription | None = None
        self._nc = nc
        self._take: Callable[..., Any] = take
        self._is_direct = not inspect.iscoroutinefunction(take)
        self._counts = counts
        self._on_dropped = on_dropped
        self._on_closed = on_closed
        self._assembler = Assembler(
            message_bytes_max=frame_budget_bytes, held_bytes_max=HELD_BUDGETS_MAX * frame_budget_bytes
        )

    async def open(self, subject: str, *, queue_max: int, queue_bytes_max: int) -> None:
        """Subscribe. Raises nats-py's errors."""
        self.nats = await self._nc.subscribe(
            subject, cb=self._on_message, pending_msgs_limit=queue_max, pending_bytes_limit=queue_bytes_max
        )
        if self._is_direct:
            self._nc.listen(self.nats._id, self._on_direct)

    def _on_direct(self, payload: bytes, headers: dict[str, str], subject: str) -> None:
        whole = self._whole(payload, headers, subject) if headers else payload
        if whole is not None:
            self._take(whole, headers, subject)

    async def _on_message(self, msg: Msg) -> None:
        headers = msg.headers or {}
        whole = self._whole(msg.data, headers, msg.subject)
        if whole is None:
            return
        if self._is_direct:
            self._take(whole, headers, msg.subject)
        else:
            await self._take(whole, headers, msg.subject, msg.reply)

    def on_slow(self) -> None:
        """nats-py dropped a message because the queue was full."""
        self.dropped += 1
        self._counts.dropped += 1
        if self._on_dropped is not None:
            self._on_dropped()

    async def close(self) -> None:
        """Stop; messages not yet handled are discarded."""
        self._on_closed(self)
        subscription, self.nats = self.nats, None
        if subscription is None:
            return
        self._nc.forget(subscription._id)
        try:
            await subscription.unsubscribe()
        except nats.errors.Error as error:  # The connection is closed or was never established.
            log.debug("unsubscribe: %r", error)

    def _whole(self, payload: bytes, headers: dict[str, str], subject: str) -> bytes | None:
        """The payload, or None while parts of it are missing."""
        part = headers.pop(PART_HEADER, None) if headers else None
        if part is None:
            return payload
        lost = self._assembler.lost
        try:
            return self._assembler.add(subject, part, payload, asyncio.get_running_loop().time())
        except BadMessage as bad:
            count_bad(self._counts, subject, bad)
            return None
        finally:
            self._counts.parts_lost += self._assembler.lost - lost


def subject_filter(channel: Channel[Any], ids: Mapping[str, str]) -> str:
    """The subject to subscribe to. Raises ValueError for an id that would change the subject's meaning."""
    if wrong := [text for text in ids.values() if not is_subject_token(text)]:
        raise ValueError(f"{channel.subject}: {wrong[0]!r} cannot be part of a subject")
    return channel.filter(**ids)


def is_reply_subject(subject: str) -> bool:
    """Whether a reply may go there. Who asks chooses it, and must not choose what only the replier may publish to."""
    return subject.startswith("_INBOX.")


class Inbox:
    """Reply subjects below one prefix: ``a.{token}`` for asks, ``u.{key}`` for messages published with a key.

    Many parties may publish below ``a``, so the token is known only to those that receive the ask. No party may publish
    below ``u``: what arrives there is from the server.
    """

    def __init__(self, prefix: str, unreachable: Callable[[str], None]) -> None:
        self.subject = f"{prefix}.>"
        self.token = prefix.rpartition(".")[2]
        self._prefix = prefix
        self._unreachable = unreachable
        self._asks: dict[str, tuple[str, asyncio.Future[Reply]]] = {}

    def for_key(self, key: str) -> str:
        """Reply subject on which the server reports that the message with this key has no subscriber."""
        return f"{self._prefix}.u.{key}"

    @contextmanager
    def expect(self, subject: str) -> Iterator[tuple[str, asyncio.Future[Reply]]]:
        """A reply subject for an ask on ``subject``, and the future of the reply or of NoResponders."""
        token = secrets.token_hex(TOKEN_BYTES)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asks[token] = (subject, future)
        try:
            yield f"{self._prefix}.{REPLIES}.{token}", future
        finally:
            del self._asks[token]
            future.cancel()

    def fail_all(self, error: Callable[[], Exception]) -> None:
        for _, asked in self._asks.values():
            if not asked.done():
                asked.set_exception(error())

    def on_message(self, payload: bytes, headers: dict[str, str], subject: str) -> None:
        """Takes every message below the prefix."""
        kind, _, name = subject[len(self._prefix) + 1 :].partition(".")
        no_responders = not payload and headers.get(_STATUS_HEADER) == _NO_RESPONDERS
        if kind == "u" and no_responders:
            self._unreachable(name)
        if kind != REPLIES or name not in self._asks:
            return
        asked_on, asked = self._asks[name]
        if asked.done():
            return
        if no_responders:
            asked.set_exception(NoResponders(f"{asked_on} has no subscriber"))
        else:
            asked.set_result((payload, REFUSED_HEADER in headers))
