"""Messages as bytes: pack, unpack, and parts for what is larger than one NATS message.

A message in parts is a run of NATS messages with the header ``Baton-Part: <message id>/<index>/<count>``. Parts of one
message come in order, but those of several senders interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

PART_HEADER = "Baton-Part"
PART_MARGIN_BYTES = 512
"""Room for the part header, the header frame and the subject, which the server counts too."""
PART_AGE_S_MAX = 30.0
"""A half-built message that is older was cut off by a crash or a lost connection."""
HALF_BUILT_MAX = 256
"""Messages that one subscription assembles at a time."""

pack: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
"""A message as bytes."""


class BadMessage(Exception):
    """Bytes that are not the message they should be."""


@cache
def _decode(message_type: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(message_type).decode


def unpacker(message_type: type[M]) -> Callable[[bytes], M]:
    """The function that turns bytes into messages of this type; it raises one of ``UNPACK_ERRORS``."""
    return _decode(message_type)


UNPACK_ERRORS: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def unpack(payload: bytes, message_type: type[M]) -> M:
    """The message in ``payload``. Raises BadMessage."""
    try:
        return unpacker(message_type)(payload)
    except UNPACK_ERRORS as error:
        raise BadMessage(f"{message_type.__name__}: {error}") from error


def can_be_sent_to(subject: str) -> bool:
    """Whether a server reads the subject as one. An id that came from outside may hold a space or a line's end, which
    would be read as another command, or cost the connection.
    """
    return subject.isprintable() and " " not in subject


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """What headers take of a NATS message, bytes."""
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


class _HalfBuilt:
    __slots__ = ("begun_at", "count", "parts", "size")

    def __init__(self, count: int, begun_at: float) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.count = count
        self.begun_at = begun_at


class Assembler:
    """Puts the parts of interleaved messages together; bounded in bytes, messages and age. ``lost`` counts the rest."""

    def __init__(self, *, message_bytes_max: int, held_bytes_max: int) -> None:
        self.lost = 0
        self._message_bytes_max = message_bytes_max
        self._held_bytes_max = held_bytes_max
        self._held_bytes = 0
        self._half_built: dict[str, _HalfBuilt] = {}

    def add(self, header: str, data: bytes, now: float) -> bytes | None:
        """One part arrived at ``now`` (seconds): the whole message, or None until it is complete."""
        self._forget_old(now)
        message_id, index, count = _parse(header)
        if index == 0 and message_id not in self._half_built:
            self._half_built[message_id] = _HalfBuilt(count, now)
        building = self._half_built.get(message_id)
        if building is None:
            return None  # The rest of a message that was given up: it has been counted.
        if index != len(building.parts) or count != building.count:
            self._give_up(message_id)
            return None
        building.parts.append(data)
        building.size += len(data)
        self._held_bytes += len(data)
        if building.size > self._message_bytes_max:
            self._give_up(message_id)
            return None
        if len(building.parts) == count:
            self._release(message_id)
            return b"".join(building.parts)
        self._make_room()
        return None

    def _forget_old(self, now: float) -> None:
        while self._half_built:
            oldest_id, oldest = next(iter(self._half_built.items()))
            if now - oldest.begun_at <= PART_AGE_S_MAX:
                return
            self._give_up(oldest_id)

    def _make_room(self) -> None:
        while self._held_bytes > self._held_bytes_max or len(self._half_built) > HALF_BUILT_MAX:
            self._give_up(next(iter(self._half_built)))

    def _give_up(self, message_id: str) -> None:
        self._release(message_id)
        self.lost += 1

    def _release(self, message_id: str) -> None:
        self._held_bytes -= self._half_built.pop(message_id).size


def _parse(header: str) -> tuple[str, int, int]:
    message_id, *numbers = header.split("/")
    try:
        index, count = (int(number) for number in numbers)
    except ValueError as error:
        raise BadMessage(f"{PART_HEADER}: {header!r}") from error
    if not message_id or not 0 <= index < count:
        raise BadMessage(f"{PART_HEADER}: {header!r}")
    return message_id, index, count
