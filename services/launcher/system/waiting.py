"""Waits for the first of two awaitables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def first_of(wanted: Awaitable[T], other: Awaitable[object], *, within_s: float | None = None) -> T | None:
    """The result of ``wanted``, or None if ``other`` or the time ended first. Exceptions of both propagate."""
    first, second = asyncio.ensure_future(wanted), asyncio.ensure_future(other)
    try:
        done, _ = await asyncio.wait({first, second}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if first in done:
            return first.result()
        if second in done:
            second.result()
        return None
    finally:
        first.cancel()
        second.cancel()
