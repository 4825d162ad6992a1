"""What every message on the bus is: an immutable msgspec struct, msgpack on the wire."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything that crosses a process.

    Subclasses repeat ``frozen=True, kw_only=True``: msgspec does not inherit the second, type checkers not the first.

    Fields may be added with a default; anything else is a new message (see ``version``).
    """


class PackedMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of what is sent many times a second: fields travel by position. New fields go last, with a default."""
