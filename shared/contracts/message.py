"""Wire version and base classes of all messages: immutable msgspec structs, msgpack on the wire."""

from __future__ import annotations

from typing import Any

import msgspec

WIRE_VERSION = 4
"""
1: first version.
2: messages, fields and subjects renamed.
3: an END frame may have the data and the head of a response.
4: blocks of grants and offers by KV cache group, groups by kind; capacity and load of a KV cache in tokens.
"""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all messages between processes. The garbage collector need not know them: what was read from bytes has no
    cycles.

    Subclasses repeat ``frozen=True, kw_only=True``: msgspec does not inherit ``kw_only``, type checkers do not inherit
    ``frozen``.

    A field with a default may be added. Any other change increments ``WIRE_VERSION``.
    """


class PackedMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Base of frequent messages: fields are encoded by position. New fields go last, with a default."""


def in_full(value: Any) -> Any:
    """A message as JSON values, including fields with their default value."""
    if isinstance(value, msgspec.Struct):
        return {name: in_full(getattr(value, name)) for name in value.__struct_fields__}
    return [in_full(one) for one in value] if isinstance(value, list) else value
