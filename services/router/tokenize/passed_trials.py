"""Which tokenizers and templates have passed their trial on this machine, so that a later start needs none."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

log = logging.getLogger("baton.router")

KEPT_MAX: Final = 256
"""Trials that are remembered; beyond that, the oldest is dropped."""
FOLDER: Final = "passed-trials"
LIBRARIES: Final = ("tokenizers", "jinja2")


class PassedTrials:
    """An empty file for each in a folder that only this user may write, and that may be deleted at any time. A folder
    that others may write is not believed. ``tried_by``: what a trial's result depends on beside what is tried.
    """

    def __init__(self, folder: Path, tried_by: bytes | None = None) -> None:
        self._folder = folder
        self._tried_by = trial_digest() if tried_by is None else tried_by

    @classmethod
    def in_cache(cls, cache_dir: str) -> PassedTrials:
        return cls(Path(cache_dir).expanduser() / FOLDER)

    def has(self, candidate: bytes) -> bool:
        """Whether an equal candidate has passed."""
        return _is_own(self._folder, stat.S_ISDIR) and _is_own(self._file(candidate), stat.S_ISREG)

    def add(self, candidate: bytes) -> None:
        """Remember it; a folder that is not writable costs a trial at each start."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._file(candidate), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            files = sorted(self._folder.iterdir(), key=lambda file: file.lstat().st_mtime)
            for file in files[:-KEPT_MAX]:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.debug("the passed trial of a tokenizer is not kept: %s", error)

    def _file(self, candidate: bytes) -> Path:
        return self._folder / hashlib.sha256(self._tried_by + candidate).hexdigest()


def trial_digest() -> bytes:
    """A digest of the code and the libraries that try."""
    digest = hashlib.sha256(sys.version.encode())
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)} ".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether it is of this kind, this user's, and nobody else may write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
