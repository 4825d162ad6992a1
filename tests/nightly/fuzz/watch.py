"""What a fuzzed process must not do: fail, or grow."""

from __future__ import annotations

import gc
import logging
from types import TracebackType
from typing import Self

import psutil

FINDINGS_MAX = 50
OBJECTS_GROWN_MAX = 60_000
"""In one campaign, when what is bounded is full: one object for every second input would be more."""


DISPLACED = "baton.service: the process ends: another process is worker"
"""What a worker says when a record tells it that a later process has its id."""


class Watch(logging.Handler):
    """``with Watch() as watch``: collects every error that is logged, bugs of tasks that nobody awaits included."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.findings: list[str] = []
        self._formatter = logging.Formatter("%(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        text = self._formatter.format(record)
        if len(self.findings) < FINDINGS_MAX and not text.startswith(DISPLACED):
            self.findings.append(text)

    def __enter__(self) -> Self:
        self._root = logging.getLogger()
        self._before = self._root.level, self._root.handlers[:]
        self._root.handlers[:] = [self]
        self._root.setLevel(logging.ERROR)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        level, self._root.handlers[:] = self._before
        self._root.setLevel(level)


def objects() -> int:
    """That are alive after everything that can go is gone."""
    gc.collect()
    return len(gc.get_objects())


def memory_bytes() -> int:
    """Of this process."""
    return int(psutil.Process().memory_info().rss)
