"""The way from bytes to a handler, an answerer or an asker: the same for both buses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from shared.bus.port import Answerer, AskRefused, BusCounts, Envelope, Handler
from shared.bus.wire import UNPACK_ERRORS, BadMessage, pack, unpack, unpacker
from shared.contracts.channels import AskChannel, Channel
from shared.contracts.failures import Failure, Reason

log = logging.getLogger("baton.bus")

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

BAD_MESSAGES_LOGGED_MAX = 10
"""So many bad messages have a line each in the log; after that only each one that doubles their number: whoever sends
nonsense cannot fill a disk.
"""
SUBJECT_SHOWN_MAX = 200

Reply = tuple[bytes, bool]
"""An answer's bytes, and whether they are a ``Failure`` instead of what was asked for."""


class Receiver(Generic[M]):
    """Unpacks and hands over one message at a time. A handler that raises ends the bus."""

    __slots__ = ("_address", "_counts", "_fail", "_handler", "_subject", "_unpack", "waits")

    def __init__(
        self,
        channel: Channel[M],
        handler: Handler[M],
        counts: BusCounts,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._subject = channel.subject
        self._address = channel.address
        self._unpack = unpacker(channel.message)
        self._handler: Callable[[M, Envelope], Any] = handler
        self.waits = inspect.iscoroutinefunction(handler)
        """Whether the handler is a coroutine function: then ``take`` is for it, else ``take_now``."""
        self._counts = counts
        self._fail = fail

    async def take(self, payload: bytes, headers: Mapping[str, str], subject: str) -> None:
        """Let a coroutine function handle one payload that came on ``subject``."""
        message = self._read(payload, subject)
        if message is None:
            return
        try:
            await self._handler(message, Envelope(headers, len(payload)))
        except Exception as bug:
            self._end(bug)

    def take_now(self, payload: bytes, headers: Mapping[str, str], subject: str) -> None:
        """Let a plain function handle one payload that came on ``subject``."""
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
        if self._address(message) != subject:
            count_bad(self._counts, subject, misaddressed(self._address(message)))
            return None
        return message

    def _end(self, bug: Exception) -> None:
        log.error("the handler of %s raised: the bus ends", self._subject, exc_info=bug)
        self._fail(bug)


def count_bad(counts: BusCounts, subject: str, error: Exception) -> None:
    """A message that cannot be read or believed is counted and logged, within limits, and never raised."""
    counts.bad_messages += 1
    number = counts.bad_messages
    if number <= BAD_MESSAGES_LOGGED_MAX or number.bit_count() == 1:
        log.warning("bad message on %r (number %d since the start): %s", subject[:SUBJECT_SHOWN_MAX], number, error)


def misaddressed(address: str) -> BadMessage:
    """What is wrong with a message whose ids are not those of the subject that it came on. The bus's permissions are
    about subjects: whoever may speak on one must not speak for another in the message.
    """
    return BadMessage(f"by the ids in it, it belongs on {address[:SUBJECT_SHOWN_MAX]!r}")


async def make_reply(
    channel: AskChannel[M, A],
    answerer: Answerer[M, A],
    payload: bytes,
    subject: str,
    envelope: Envelope,
    reply_bytes_max: int,
) -> Reply:
    """Let ``answerer`` answer one ask. Raises BadMessage after which the asker must be told ``unreadable()``."""
    ask = unpack(payload, channel.message)
    if channel.address(ask) != subject:
        raise misaddressed(channel.address(ask))
    try:
        answer = pack(await answerer(ask, envelope))
    except AskRefused as no:
        return pack(no.failure), True
    if len(answer) > reply_bytes_max:
        text = f"the answer is {len(answer)} bytes; at most {reply_bytes_max} fit on the bus"
        return pack(Failure(reason=Reason.TOO_LARGE, message=text)), True
    return answer, False


def unreadable(bad: BadMessage) -> Reply:
    """The reply to an ask that could not be read."""
    return pack(Failure(reason=Reason.BAD_MESSAGE, message=str(bad))), True


def read_reply(reply: Reply, answer_type: type[A]) -> A:
    """The answer. Raises AskRefused."""
    payload, refused = reply
    try:
        if refused:
            raise AskRefused(unpack(payload, Failure))
        return unpack(payload, answer_type)
    except BadMessage as bad:
        raise AskRefused(Failure(reason=Reason.BAD_MESSAGE, message=f"unreadable answer: {bad}")) from bad


def read_kept(channel: Channel[M], key: str, payload: bytes) -> M:
    """The value kept under that key. Raises BadMessage."""
    value = unpack(payload, channel.message)
    if (address := channel.address(value)).partition(".")[2] != key:
        raise misaddressed(address)
    return value
