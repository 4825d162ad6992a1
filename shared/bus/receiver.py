"""From received bytes to a handler, a responder or an asker; independent of the transport."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from shared.bus.port import AskRefused, BusCounts, Envelope, Handler, Responder
from shared.bus.wire import UNPACK_ERRORS, BadMessage, pack, unpack, unpacker
from shared.contracts.channels import AskChannel, Channel
from shared.contracts.failures import Failure, Reason

log = logging.getLogger("baton.bus")

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

BAD_MESSAGES_LOGGED_MAX: Final = 10
"""The first bad messages are each logged, later ones whenever their number has doubled, so that a faulty sender cannot
fill the disk.
"""
SUBJECT_SHOWN_MAX: Final = 200

SENDERS_KNOWN_MAX: Final = 4096
"""Subjects of a subscription that are remembered, with the ids of their messages. A plain dict is cleared when it is
full: compiled code reads it without a call, unlike ``Bounded``."""

Reply = tuple[bytes, bool]
"""The bytes of a reply, and whether they are a ``Failure``."""


class Receiver(Generic[M]):
    """Unpacks messages and passes them to the handler. A handler that raises ends the bus."""

    __slots__ = ("_address", "_counts", "_fail", "_handler", "_ids", "_known", "_subject", "_unpack", "is_async")

    def __init__(
        self, channel: Channel[M], handler: Handler[M], counts: BusCounts, fail: Callable[[BaseException], None]
    ) -> None:
        self._subject = channel.subject
        self._address = channel.address
        self._ids = channel.ids
        self._known: dict[str, object] = {}
        """The ids that messages on a subject have: it takes less time to compare them than to make the subject."""
        self._unpack = unpacker(channel.message)
        self._handler: Callable[[M, Envelope], Any] = handler
        self.is_async = inspect.iscoroutinefunction(handler)
        """Whether the handler is a coroutine function, called by ``take``; otherwise ``take_now`` calls it."""
        self._counts = counts
        self._fail = fail

    async def take(self, payload: bytes, headers: Mapping[str, str], subject: str) -> None:
        """Pass a payload that arrived on ``subject`` to a coroutine function."""
        message = self._read(payload, subject)
        if message is None:
            return
        try:
            await self._handler(message, Envelope(headers, len(payload)))
        except Exception as bug:
            self._end(bug)

    def take_now(self, payload: bytes, headers: Mapping[str, str], subject: str) -> None:
        """Pass a payload that arrived on ``subject`` to a plain function."""
        message = self._read(payload, subject)
        if message is None:
            return
        try:
            if self._handler(message, Envelope(headers, len(payload))) is not None:
                raise TypeError(f"the handler of {self._subject} is a plain function and must return None")
        except Exception as bug:
            self._end(bug)

    def _read(self, payload: bytes, subject: str) -> M | None:
        try:
            message = self._unpack(payload)
        except UNPACK_ERRORS as error:
            count_bad(self._counts, subject, error)
            return None
        ids = self._ids(message)
        if self._known.get(subject) == ids:
            return message
        if self._address(message) != subject:
            count_bad(self._counts, subject, wrong_subject(self._address(message)))
            return None
        if len(self._known) >= SENDERS_KNOWN_MAX:
            self._known.clear()
        self._known[subject] = ids
        return message

    def _end(self, bug: Exception) -> None:
        log.error("the handler of %s raised: the bus ends", self._subject, exc_info=bug)
        self._fail(bug)


def count_bad(counts: BusCounts, subject: str, error: Exception) -> None:
    """Count a bad message, and log it within limits."""
    counts.bad_messages += 1
    number = counts.bad_messages
    if is_logged(number):
        log.warning("bad message on %r (number %d since the start): %s", subject[:SUBJECT_SHOWN_MAX], number, error)


def is_logged(number: int) -> bool:
    """Whether the event with this number, of a kind that a sender can cause at will, gets a log line."""
    return number <= BAD_MESSAGES_LOGGED_MAX or number.bit_count() == 1


def wrong_subject(address: str) -> BadMessage:
    """The error for a message whose ids differ from those of its subject. NATS permissions apply to subjects, so a
    sender that may publish to one subject must not name the ids of another in the message.
    """
    return BadMessage(f"its ids belong to the subject {address[:SUBJECT_SHOWN_MAX]!r}")


async def make_reply(
    channel: AskChannel[M, A],
    responder: Responder[M, A],
    payload: bytes,
    subject: str,
    envelope: Envelope,
    reply_bytes_max: int,
) -> Reply:
    """The reply to one ask. Raises BadMessage; the reply is then ``unreadable()``."""
    ask = unpack(payload, channel.message)
    if channel.address(ask) != subject:
        raise wrong_subject(channel.address(ask))
    try:
        reply = pack(await responder(ask, envelope))
    except AskRefused as no:
        return pack(no.failure), True
    if len(reply) > reply_bytes_max:
        text = f"the reply has {len(reply)} bytes; the limit of the bus is {reply_bytes_max}"
        return pack(Failure(reason=Reason.TOO_LARGE, message=text)), True
    return reply, False


def unreadable(bad: BadMessage) -> Reply:
    """The reply to an ask that could not be read."""
    return pack(Failure(reason=Reason.BAD_MESSAGE, message=str(bad))), True


def read_reply(reply: Reply, channel: AskChannel[M, A], ask: M) -> A:
    """The unpacked reply to ``ask``. Raises AskRefused."""
    payload, refused = reply
    try:
        if refused:
            raise AskRefused(unpack(payload, Failure))
        answer = unpack(payload, channel.answer)
        if not channel.names_alike(ask, answer):
            raise BadMessage(f"its ids differ from those of {channel.address(ask)[:SUBJECT_SHOWN_MAX]!r}")
        return answer
    except BadMessage as bad:
        raise AskRefused(Failure(reason=Reason.BAD_MESSAGE, message=f"unreadable reply: {bad}")) from bad


def read_entry(channel: Channel[M], key: str, payload: bytes) -> M:
    """The value of the entry with that key. Raises BadMessage."""
    value = unpack(payload, channel.message)
    if (address := channel.address(value)).partition(".")[2] != key:
        raise wrong_subject(address)
    return value
