"""Numbers and choices as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import EnumType
from typing import get_args, get_type_hints


def duration(seconds: float) -> str:
    """At most three significant digits, in milliseconds or seconds."""
    ms = seconds * 1000
    if abs(ms) < 0.05:
        return "0 ms"
    if abs(ms) < 9.95:
        return f"{ms:.1f} ms"
    if abs(ms) < 999.5:
        return f"{ms:.0f} ms"
    if abs(seconds) < 9.995:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if abs(seconds) < 99.95 else f"{seconds:.0f} s"


def counted(number: int) -> str:
    """With thousands separators."""
    return f"{number:,}"


def bytes_per_second(speed: float) -> str:
    """In decimal units, as bandwidths are given: ``0.52 GB/s``."""
    giga = speed / 1e9
    return f"{giga:.2g} GB/s" if giga < 10 else f"{giga:.0f} GB/s"


def in_bytes(count: int) -> str:
    """In the largest binary unit that gives at least 1."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 99.95 else f"{size:.1f} {units[0]}"


def compact(number: int) -> str:
    """In at most five characters below a million millions: ``9,999``, ``12.3K``, ``4.56M``."""
    if number < 10_000:
        return f"{number:,}"
    size, units = float(number), ["", "K", "M", "G", "T"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f}{units[0]}"


def long_duration(seconds: float) -> str:
    """Like ``duration``, beyond 100 s in minutes or hours."""
    if seconds < 99.95:
        return duration(seconds)
    return f"{seconds / 60:.1f} min" if seconds < 5997 else f"{seconds / 3600:,.1f} h"


def choices_of(kind: type, field: str) -> list[str]:
    """Choices of a field that has a Literal or an enum as its type, or may be None instead; else empty."""
    hint = get_type_hints(kind).get(field)
    values: Iterable[object] = (hint,) if isinstance(hint, EnumType) else get_args(hint)
    found = [each for value in values for each in (value if isinstance(value, EnumType) else (value,))]
    return [str(value) for value in found if value and value is not type(None)]
