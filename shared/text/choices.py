"""The possible values of a field, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from enum import EnumType
from typing import get_args, get_type_hints


def choices_of(kind: type, field: str) -> list[str]:
    """Of a field that has a Literal or an enum as its type, or may be None instead; else empty."""
    hint = get_type_hints(kind).get(field)
    values: Iterable[object] = (hint,) if isinstance(hint, EnumType) else get_args(hint)
    found = [each for value in values for each in (value if isinstance(value, EnumType) else (value,))]
    return [str(value) for value in found if value and value is not type(None)]
