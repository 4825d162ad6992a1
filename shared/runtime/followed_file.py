"""A file that an operator may change while the process runs: read again when it changes, kept when it is invalid."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from shared.runtime.settings import SettingsError

T = TypeVar("T")

CHECK_S = 2.0
"""Between two looks at the file."""
REMIND_S = 60.0
"""Between two log lines about the same failure."""

FileState = tuple[int, ...]


class FollowedFile(Generic[T]):
    """The last valid content of a file. A replaced file, a folder that was mounted anew and a file that became readable
    are seen at the next look, because what could not be read is tried again at each.
    """

    def __init__(self, path: str, read: Callable[[], T], *, what: str, log: logging.Logger) -> None:
        """``read`` reads and checks the file and raises SettingsError; ``what`` is in it, for log lines. Raises
        SettingsError when the file is invalid now.
        """
        self._path = path
        self._read = read
        self._what = what
        self._log = log
        self._seen = state_of(path)
        self.value = read()
        self.failure = ""
        """Why the file cannot be used now; empty while it can. ``value`` is the last valid content then."""

    async def follow(self, on_value: Callable[[T], None], check_s: float = CHECK_S) -> None:
        """Look until cancelled. ``on_value`` gets each new content."""
        unlogged_s = 0.0
        while True:
            await asyncio.sleep(check_s)
            unlogged_s += check_s
            state = await asyncio.to_thread(state_of, self._path)
            if state == self._seen and not self.failure:
                continue
            self._seen = state
            try:
                self.value = await asyncio.to_thread(self._read)
            except SettingsError as error:
                if str(error) != self.failure or unlogged_s >= REMIND_S:
                    self._log.error("%s are unchanged, because their file cannot be used: %s", self._what, error)
                    unlogged_s = 0.0
                self.failure = str(error)
                continue
            self.failure = ""
            self._log.info("read %s again", self._what)
            on_value(self.value)


def state_of(path: str) -> FileState:
    """Differs when the file was written, replaced, or given other permissions. Empty: it cannot be found."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
