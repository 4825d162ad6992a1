"""Messages that are nearly right: golden ones with ids that exist and a few things changed, as trees and as bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from tests.contracts.golden_files import FOLDER

INTEGERS = (-1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63))
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.5, 1e-300, 1e300, 5e-324, 1e9)
TEXTS = (
    "",
    "x",
    "w1",
    "nobody",
    "a.b",
    "*",
    ">",
    "a b",
    "a\r\nb",
    "\0",
    "é\u2028",
    "x" * 5000,
    "__proto__",
    "-1",
    "NaN",
)
BYTES = (b"", b"\0", b"\xff" * 31, b"\xff" * 32, b"\xff" * 33, b"{}", b'{"model":"m"}', b"x" * 5000)
ODDITIES = [
    msgspec.msgpack.encode(value)
    for value in (None, True, -1, 2**64 - 1, math.nan, "", "x", b"", [], {}, [[]] * 3, {"x": None}, [None])
]
"""Packed, so that each is made anew."""
MUTATIONS_MAX = 3
DEPTH_MAX = 12
REPEATED = (2, 3, 50)

Ids = dict[str, Sequence[Any]]
"""By the name of a field: values that mean something just now."""


class Mutator:
    """Makes payloads of one message type. The same seed makes the same ones, if the ids are the same."""

    def __init__(self, message: type[msgspec.Struct], seed: int) -> None:
        self._random = random.Random(f"{message.__name__} {seed}")
        self._golden = (FOLDER / f"{message.__name__}.msgpack").read_bytes()
        self._type = types.type_info(message)
        self._fields = message.__struct_fields__
        self._changes: dict[type, Callable[[Any], Any]] = {
            bool: lambda value: not value,
            int: lambda _value: self._random.choice(INTEGERS),
            float: lambda _value: self._random.choice(FLOATS),
            str: self._text,
            bytes: self._bytes,
            list: self._list,
            dict: self._dict,
        }

    def payload(self, ids: Ids) -> tuple[bytes, dict[str, Any]]:
        """Bytes, and the message in them as far as it is known."""
        tree = msgspec.msgpack.decode(self._golden)
        self._name(tree, self._type, ids)
        kind = self._random.random()
        if kind < 0.75:
            for _ in range(self._random.randint(0, MUTATIONS_MAX)):
                tree = self._mutated(tree, DEPTH_MAX)
        packed = msgspec.msgpack.encode(tree)
        if kind > 0.9:
            packed = self._bytes(packed)
        if isinstance(tree, list):
            tree = dict(zip(self._fields, tree, strict=False))
        return packed, tree if isinstance(tree, dict) else {}

    def _name(self, tree: Any, kind: types.Type, ids: Ids) -> None:
        """Let it be about somebody, at all depths."""
        if isinstance(kind, types.UnionType):
            kind = next((one for one in kind.types if isinstance(one, types.StructType | types.ListType)), kind)
        if isinstance(kind, types.ListType) and isinstance(tree, list):
            for each in tree:
                self._name(each, kind.item_type, ids)
        elif isinstance(kind, types.StructType) and isinstance(tree, list | dict):
            for at, field in enumerate(kind.fields):
                key = at if kind.array_like else field.encode_name
                known = ids.get(field.name)
                if isinstance(tree, list) and at >= len(tree):
                    return  # Written before there was such a field.
                if isinstance(tree, dict) and key not in tree:
                    continue
                if known and self._random.random() < 0.8:
                    tree[key] = self._random.choice(known)
                elif isinstance(tree[key], list | dict):
                    self._name(tree[key], field.type, ids)

    def _mutated(self, value: Any, depth: int) -> Any:
        """With one thing changed, somewhere in it."""
        inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        if inside and depth and self._random.random() < 0.8:
            key = self._random.choice(inside)
            value[key] = self._mutated(value[key], depth - 1)
            return value
        if self._random.random() < 0.1:
            return self._oddity()
        change = self._changes.get(type(value))
        return change(value) if change is not None else self._oddity()

    def _oddity(self) -> Any:
        return msgspec.msgpack.decode(self._random.choice(ODDITIES))

    def _text(self, value: str) -> str:
        return self._random.choice(TEXTS) if self._random.random() < 0.9 else value * 2

    def _bytes(self, value: bytes) -> bytes:
        at = self._random.randrange(len(value) + 1)
        match self._random.randrange(5):
            case 0:
                return self._random.choice(BYTES)
            case 1:
                return value[:at]
            case 2:
                return value[:at] + self._random.randbytes(self._random.randrange(1, 9)) + value[at:]
            case 3:
                return value * self._random.choice(REPEATED)
            case _:
                flipped = bytearray(value or b"\0")
                flipped[min(at, len(flipped) - 1)] ^= 1 << self._random.randrange(8)
                return bytes(flipped)

    def _list(self, value: list[Any]) -> list[Any]:
        match self._random.randrange(4):
            case 0:
                return []
            case 1:
                return value * self._random.choice(REPEATED)
            case 2:
                return [*value, self._oddity()]
            case _:
                return value[::-1]

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        if value and self._random.random() < 0.6:
            del value[self._random.choice(list(value))]
        else:
            value[self._random.choice(TEXTS)] = self._oddity()
        return value
