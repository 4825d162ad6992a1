"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of ``512M``, ``2GiB`` or ``1073741824``, in powers of 1024. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is not a size; write it like 512M or 2G")
    return int(float(found[1]) * UNITS[found[2]])
