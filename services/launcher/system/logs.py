"""The log files of child processes: bounded in size, and read from their end.

A child writes to its file itself, opened for appending, so that a launcher that stands still delays nobody. A file that
has grown too large is copied and truncated; lines written between the two are lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger("baton.launcher")

FILE_BYTES_MAX = 16 * 1024 * 1024
"""Above this a file is rotated."""
FILES_MAX = 4
"""Per process: the current one and older ones, NAME.log.1 being the newest of these."""
ROTATE_S = 1.0
"""Between two looks at the sizes."""
TAIL_BYTES_MAX = 256 * 1024
TAIL_LINES_MAX = 400


def rotate(current: Path, *, bytes_max: int = FILE_BYTES_MAX) -> None:
    """Rotate the file if it is larger than ``bytes_max``. On a full disk its content is dropped. Raises OSError."""
    if not current.exists() or current.stat().st_size <= bytes_max:
        return
    try:
        for number in range(FILES_MAX - 1, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                older(current, number - 1).replace(older(current, number))
        shutil.copyfile(current, older(current, 1))
    except OSError as error:
        log.warning("%s was not kept: %s", current, error)
        with contextlib.suppress(OSError):
            older(current, 1).unlink()
    os.truncate(current, 0)


def older(current: Path, number: int) -> Path:
    """The rotated file; 1 is the newest."""
    return current.with_name(f"{current.name}.{number}")


def tail(current: Path) -> list[str]:
    """The last lines, at most ``TAIL_LINES_MAX`` in ``TAIL_BYTES_MAX``, also those that were just rotated."""
    end = _end_of(current, TAIL_BYTES_MAX)
    end = _end_of(older(current, 1), TAIL_BYTES_MAX - len(end)) + end
    return end.decode(errors="replace").splitlines(keepends=True)[-TAIL_LINES_MAX:]


def remove(folder: Path) -> None:
    """Delete the log files of an earlier system."""
    for pattern in ("*.log", "*.log.[0-9]"):
        for file in folder.glob(pattern):
            file.unlink()


def _end_of(file: Path, bytes_max: int) -> bytes:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - bytes_max))
            return opened.read(bytes_max)
    except FileNotFoundError:
        return b""
