"""Messages as bytes: pack and unpack, and split into parts what exceeds one NATS message.

Each part is a NATS message with the header ``Baton-Part: <message id>/<index>/<count>``. The parts of one message
arrive in order; parts of several senders interleave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

PART_HEADER: Final = "Baton-Part"
PART_MARGIN_BYTES: Final = 512
"""Space for the part header, the header frame and the subject, which the server counts too."""
PART_AGE_S_MAX: Final = 30.0
"""An older incomplete message was cut off by a crash or a lost connection."""
INCOMPLETE_MAX: Final = 256
"""Incomplete messages that one subscription holds."""

pack: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode


class BadMessage(Exception):
    """Bytes that are not a valid message of the expected type."""


@cache
def _decode(message_type: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(message_type).decode


def unpacker(message_type: type[M]) -> Callable[[bytes], M]:
    """A function that unpacks messages of this type; it raises one of ``UNPACK_ERRORS``."""
    return _decode(message_type)


UNPACK_ERRORS: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def unpack(payload: bytes, message_type: type[M]) -> M:
    """The message in ``payload``. Raises BadMessage."""
    try:
        return unpacker(message_type)(payload)
    except UNPACK_ERRORS as error:
        raise BadMessage(f"{message_type.__name__}: {error}") from error


def can_be_sent_to(subject: str) -> bool:
    """Whether the subject is valid. An id from outside may contain a space or a line break, which the server would read
    as another command, or close the connection for.
    """
    return subject.isprintable() and " " not in subject


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """Bytes that headers take of a NATS message."""
    if not headers:
        return 0
    return sum(4 + len(name) + len(value.encode()) for name, value in headers.items())


def split(payload: bytes, part_bytes_max: int, message_id: str) -> Iterator[tuple[str, memoryview]]:
    """The parts of a payload, each with the value of its ``Baton-Part`` header."""
    view = memoryview(payload)
    count = -(-len(view) // part_bytes_max)
    for index in range(count):
        start = index * part_bytes_max
        yield f"{message_id}/{index}/{count}", view[start : start + part_bytes_max]


class _Incomplete:
    __slots__ = ("begun_at", "count", "parts", "size")

    def __init__(self, count: int, begun_at: float) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.count = count
        self.begun_at = begun_at


class Assembler:
    """Joins the parts of interleaved messages; bounded in bytes, messages and age. ``lost`` counts dropped messages.

    When there are too many, the subject that holds most loses its oldest, so that no sender pushes out another's.
    """

    def __init__(self, *, message_bytes_max: int, held_bytes_max: int) -> None:
        self.lost = 0
        self._message_bytes_max = message_bytes_max
        self._held_bytes_max = held_bytes_max
        self._held_bytes = 0
        self._incomplete: dict[tuple[str, str], _Incomplete] = {}

    def add(self, subject: str, header: str, data: bytes, now: float) -> bytes | None:
        """Add a part that arrived on ``subject`` at ``now`` (seconds). Returns the whole message, or None until it is
        complete. Parts on different subjects are of different messages, so that no sender can add to another's.
        """
        self._drop_old(now)
        message, index, count = _parse(header)
        message_id = subject, message
        if index == 0 and message_id not in self._incomplete:
            self._incomplete[message_id] = _Incomplete(count, now)
        building = self._incomplete.get(message_id)
        if building is None:
            return None  # A later part of a message that was dropped and counted.
        if index != len(building.parts) or count != building.count:
            self._drop(message_id)
            return None
        building.parts.append(data)
        building.size += len(data)
        self._held_bytes += len(data)
        if building.size > self._message_bytes_max:
            self._drop(message_id)
            return None
        if len(building.parts) == count:
            self._release(message_id)
            return b"".join(building.parts)
        self._free_space()
        return None

    def _drop_old(self, now: float) -> None:
        while self._incomplete:
            oldest_id, oldest = next(iter(self._incomplete.items()))
            if now - oldest.begun_at <= PART_AGE_S_MAX:
                return
            self._drop(oldest_id)

    def _free_space(self) -> None:
        while self._held_bytes > self._held_bytes_max:
            self._drop_oldest_of_most({one: message.size for one, message in self._incomplete.items()})
        while len(self._incomplete) > INCOMPLETE_MAX:
            self._drop_oldest_of_most(dict.fromkeys(self._incomplete, 1))

    def _drop_oldest_of_most(self, weights: Mapping[tuple[str, str], int]) -> None:
        held: Counter[str] = Counter()
        for (subject, _message), weight in weights.items():
            held[subject] += weight
        ((most, _weight),) = held.most_common(1)
        self._drop(next(message_id for message_id in weights if message_id[0] == most))

    def _drop(self, message_id: tuple[str, str]) -> None:
        self._release(message_id)
        self.lost += 1

    def _release(self, message_id: tuple[str, str]) -> None:
        self._held_bytes -= self._incomplete.pop(message_id).size


def _parse(header: str) -> tuple[str, int, int]:
    message_id, *numbers = header.split("/")
    try:
        index, count = (int(number) for number in numbers)
    except ValueError as error:
        raise BadMessage(f"{PART_HEADER}: {header!r}") from error
    if not message_id or not 0 <= index < count:
        raise BadMessage(f"{PART_HEADER}: {header!r}")
    return message_id, index, count
