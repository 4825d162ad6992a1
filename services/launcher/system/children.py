"""Child processes: each has its own process group and log file, and none outlives the launcher.

A child writes to its log file itself, opened for appending, so that a stalled launcher delays no child. A file
that has grown too large is copied and truncated; lines written between the two are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.launcher.system import guard
from services.launcher.system.process_plan import ProcessPlan
from shared.runtime.waiting import first_of

KILL_S_MAX = 10.0
"""A process ends within this time after SIGKILL, unless it hangs in the kernel."""
log = logging.getLogger("baton.launcher")

FILE_BYTES_MAX = 16 * 1024 * 1024
"""Above this a file is rotated."""
FILES_MAX = 4
"""Per process: the current one and older ones, NAME.log.1 being the newest of these."""
ROTATE_S = 1.0
"""Between two looks at the sizes."""
TAIL_BYTES_MAX = 256 * 1024
TAIL_LINES_MAX = 400


@dataclass
class Child:
    """A running process and its group."""

    plan: ProcessPlan
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    async def stop(self, *, grace_s: float, hurry: asyncio.Event) -> bool:
        """SIGTERM, then SIGKILL for the whole group after ``grace_s`` or on ``hurry``. True if it ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await first_of(self.process.wait(), hurry.wait(), within_s=grace_s)
        by_itself = self.process.returncode is not None
        self.kill_group()
        await asyncio.wait_for(self.process.wait(), KILL_S_MAX)
        return by_itself

    def kill_group(self) -> None:
        """Kill the processes that it has started and left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ChildStarter:
    """Starts children and reports them to the guard, which ends them if this process is killed."""

    def __init__(self, logs: Path, environment: Mapping[str, str], guard_pipe: BinaryIO) -> None:
        self.logs = logs
        self.environment = environment
        self._guard_pipe = guard_pipe

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def start(self, plan: ProcessPlan) -> Child:
        """Start one process. Its output is appended to ``<logs>/<name>.log``. Raises OSError."""
        log = self.log_of(plan.name)
        log.parent.mkdir(parents=True, exist_ok=True)  # A user may have removed the state directory.
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                env={**self.environment, "PYTHONUNBUFFERED": "1", **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard_pipe.write(f"+{process.pid}\n".encode())
        return Child(plan, process, log)

    def forget(self, child: Child) -> None:
        """The child has ended: kill the rest of its group."""
        child.kill_group()
        with contextlib.suppress(BrokenPipeError):
            self._guard_pipe.write(f"-{child.pid}\n".encode())


@contextlib.contextmanager
def open_child_starter(logs: Path, environment: Mapping[str, str]) -> Iterator[ChildStarter]:
    """A starter with its guard process."""
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-S", guard.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as watcher:
        assert watcher.stdin is not None
        yield ChildStarter(logs, environment, watcher.stdin)  # type: ignore[arg-type]  # unbuffered: a raw FileIO


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
        log.warning("%s was cut without a copy: %s", current, error)
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
    except OSError:  # It is gone, or cannot be read.
        return b""
