"""What a third party's library throws, kept from ending the process.

A panic of a library in Rust reaches Python as pyo3's PanicException, which is a BaseException: every ``except
Exception`` lets it pass, and it ends the task group above it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

ENDS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""BaseExceptions that are orders to end, not failures."""
TEXT_CHARS_MAX: Final = 200


class LibraryFailed(Exception):
    """A library raised what is neither an Exception nor an order to end."""


class Contained:
    """Around a call of a library: what it raises is an Exception, or an order to end."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        if error is not None and not isinstance(error, (Exception, *ENDS)):
            raise LibraryFailed(f"{type(error).__name__}: {str(error)[:TEXT_CHARS_MAX]}") from error


CONTAINED: Final = Contained()
